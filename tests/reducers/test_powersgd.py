"""PowerSGD: agrees with torch's hook, finds the best low-rank matrix, and forgets a step that was not finite."""

from itertools import pairwise

import pytest
import torch

from support import powersgd_cases
from support.cases import cases
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.core import Layout, Step, reduce, state
from tersegrad.reducers import Dense, PowerSGD
from tersegrad.testing import inputs, reducers, runs
from tersegrad.wrappers import ErrorFeedback

LAYOUT = Layout(("w", "b", "v"), ((40, 30), (40,), (20, 50)), seed=4)


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low_rank(seed, rows, columns, rank):
    return random(seed, rows, rank) @ random(seed + 1000, rank, columns)


def one_worker():
    return threads.run(1, lambda comm: comm)[0]


class Run:
    """One worker that is handed matrices."""

    def __init__(self, rank, shape, error_feedback=False):
        self.reducer = ErrorFeedback(PowerSGD(rank)) if error_feedback else PowerSGD(rank)
        self.bucket, self.comm = Layout(("w",), (shape,)), one_worker()
        self.state = self.reducer.init(self.bucket, self.comm)

    def __call__(self, matrix):
        x = matrix.clone().reshape(-1)
        reduce(self.reducer, Step(self.bucket), x, x, self.state, self.comm)
        (state.commit if bool(x.isfinite().all()) else state.roll_back)(self.state)
        return x.view_as(matrix)


# ---- others' implementations ---------------------------------------------------------------------------


@cases(rank=[1, 2, 4])
def test_agrees_with_the_hook_of_torch(gloo4, rank):
    for found in gloo4.run(powersgd_cases.compare, rank, False, 4):
        assert found["compressed"]
        assert found["means"] < 1e-4


@cases(rank=[1, 2, 4])
def test_agrees_with_the_hook_of_torch_with_error_feedback(gloo4, rank):
    """Means and the mean memory are the same. One's own memory is not: torch takes away the mean, we our own share."""
    for found in gloo4.run(powersgd_cases.compare, rank, True, 6):
        assert found["means"] < 1e-4
        assert found["mean memory"] < 1e-4
        assert found["own memory"] > 0.1


def test_agrees_with_the_package_of_its_authors():
    """epfml/powersgd multiplies by one side a step: two of its steps on the same matrix are one of ours."""
    theirs = pytest.importorskip(
        "powersgd.powersgd", reason="the wheel of powersgd on PyPI is empty; install it from github.com/epfml/powersgd"
    )
    matrix = random(1, 40, 30)
    package = theirs.BasicPowerSGD([matrix], theirs.BasicConfig(rank=2, num_iters_per_step=1))
    package.aggregate([matrix.clone()])
    ours = Run(2, (40, 30))
    ours.state["factors"]["tensor w"]["q"] = package._qs[0][0].clone()
    for _ in range(3):
        package.aggregate([matrix.clone()])
        mean = package.aggregate([matrix.clone()])[0]
        assert torch.allclose(ours(matrix), mean, atol=1e-4)


# ---- what it finds -------------------------------------------------------------------------------------


@cases(rank=[1, 2, 5])
def test_a_matrix_of_that_rank_is_sent_whole(rank):
    matrix = low_rank(1, 60, 50, rank)
    assert torch.allclose(Run(rank, (60, 50))(matrix), matrix, atol=1e-3)


def test_a_mean_of_that_rank_is_found_though_no_worker_has_one():
    """What counts is the mean: the workers' own parts cancel out."""
    mean, noise = low_rank(1, 40, 30, 2), random(2, 40, 30)
    xs = [mean + noise, mean - noise]
    bucket = Layout(("w",), ((40, 30),))

    def work(comm):
        x, reducer = xs[comm.rank].reshape(-1).clone(), PowerSGD(2)
        out = torch.empty_like(x)
        reduce(reducer, Step(bucket), x, out, reducer.init(bucket, comm), comm)
        return out.view(40, 30), x.view(40, 30)

    for rank, (out, rest) in enumerate(threads.run(2, work)):
        assert torch.allclose(out, mean, atol=1e-3)
        assert 0.5 * noise.norm() < rest.norm() <= xs[rank].norm()  # never more than there was


def test_enough_rank_for_any_matrix_goes_dense():
    matrix = random(1, 40, 30)
    assert torch.equal(Run(30, (40, 30))(matrix), matrix)


@cases(rank=[1, 3])
def test_warm_start_leads_to_the_best_approximation(rank):
    """On a fixed matrix, step after step: never worse, and in the end as good as the SVD's."""
    u, _, v = torch.linalg.svd(random(1, 60, 50), full_matrices=False)
    matrix = u @ torch.diag(0.8 ** torch.arange(50.0)) @ v
    best = float(torch.linalg.svdvals(matrix)[rank:].norm())
    run = Run(rank, (60, 50))
    errors = [float((matrix - run(matrix)).norm()) for _ in range(40)]
    assert errors[0] > 1.1 * best
    assert all(later <= earlier + 1e-5 for earlier, later in pairwise(errors))
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_error_feedback_sends_the_rest_in_time():
    """A constant gradient: the mean of all that was sent becomes the gradient."""
    matrix, run = random(1, 20, 30), Run(2, (20, 30), error_feedback=True)
    total = sum(run(matrix) for _ in range(200)) / 200
    assert (total - matrix).norm() < 0.2 * matrix.norm()


@cases(scale=[1e-38, 1e-30, 1e-20, 1e20, 1e30, 1e37])
def test_the_scale_does_not_matter(scale):
    matrix = low_rank(1, 40, 30, 2)
    run, scaled = Run(2, (40, 30)), Run(2, (40, 30))
    for _ in range(3):
        want, got = run(matrix), scaled(matrix * scale)
        assert torch.allclose(got.double() / scale, want.double(), atol=1e-3)


# ---- laws ----------------------------------------------------------------------------------------------


@cases(size=[1, 2, 3, 5])
@cases(rank=[1, 2, 8])
def test_laws(rank, size):
    gradient = inputs.laplace(LAYOUT.numel)
    for reducer in (PowerSGD(rank), ErrorFeedback(PowerSGD(rank))):
        reducers.check_step(reducer, size, gradient, LAYOUT)
    reducers.check_telescoping(ErrorFeedback(PowerSGD(rank)), size, inputs.laplace(inputs.LAYOUT.numel))


DEGENERATE = {
    "zero": torch.zeros(20, 30),
    "one element": torch.nn.functional.one_hot(torch.tensor(313), 600).float().view(20, 30),
    "constant": torch.full((20, 30), -0.25),
    "one row": torch.cat([torch.zeros(19, 30), torch.ones(1, 30)]),
    "denormal": torch.full((20, 30), 1e-42),
}


@cases(name=DEGENERATE)
def test_matrices_of_too_low_a_rank(name):
    """Sent whole, with nothing that is not finite."""
    matrix, run = DEGENERATE[name], Run(3, (20, 30))
    for _ in range(3):
        assert torch.allclose(run(matrix), matrix, atol=1e-6, rtol=1e-4)


def test_recovers_from_a_gradient_of_zeros():
    """An unused layer leaves Q without a direction; the next gradients find theirs again."""
    run, matrix = Run(2, (40, 30)), low_rank(1, 40, 30, 2)
    matrix[:, :5] = 0  # inputs that are never on
    run(torch.zeros(40, 30))
    run(matrix)
    assert torch.allclose(run(matrix), matrix, atol=1e-3)


@cases(bad=[float("nan"), float("inf"), float("-inf")])
@cases(where=[0, 700, 1210, 1300, -1])
def test_a_step_that_is_not_finite_leaves_no_trace(bad, where):
    """Matrix, bias, matrix: all workers see it, and all go on as if it had not been."""
    gradient = inputs.laplace(LAYOUT.numel)

    def poisoned(rank, step):
        x = gradient(rank, step if step < 2 else step - 1)  # the gradient of step 2 comes again after the bad one
        if step == 1 and rank == 1:
            x[where] = bad
        return x

    def clean(rank, step):
        return gradient(rank, 0 if step == 0 else 1 + step - 1)

    reducer = ErrorFeedback(PowerSGD(2))
    hurt = runs.run(reducer, 3, poisoned, LAYOUT, steps=4)
    well = runs.run(reducer, 3, clean, LAYOUT, steps=3)
    for h, w in zip(hurt, well, strict=True):
        assert not h.means[1].isfinite().any()
        assert all(torch.equal(a, b) for a, b in zip([h.means[0], *h.means[2:]], w.means, strict=True))
        assert runs.same(state.copy(h.state), state.copy(w.state))


def test_a_bad_value_is_seen_where_q_is_zero():
    """0 * NaN is NaN in arithmetic, but a product may leave out zeros."""
    run = Run(1, (40, 30))
    run.state["factors"]["tensor w"]["q"].zero_()
    matrix = random(1, 40, 30)
    matrix[3, 4] = float("nan")
    assert run(matrix).isnan().all()


# ---- state and traffic ---------------------------------------------------------------------------------


def test_q_is_the_same_on_all_workers_and_in_every_bucket():
    alone = threads.run(3, lambda comm: PowerSGD(2).init(Layout(("v",), ((20, 50),), seed=4), comm))
    together = threads.run(3, lambda comm: PowerSGD(2).init(LAYOUT, comm))
    first = alone[0]["factors"]["tensor v"]["q"]
    assert all(torch.equal(s["factors"]["tensor v"]["q"], first) for s in (*alone, *together))
    other = PowerSGD(2).init(Layout(("v",), ((20, 50),), seed=5), one_worker())["factors"]["tensor v"]["q"]
    assert not torch.equal(other, first)


def test_q_goes_with_its_tensor_when_buckets_change():
    reducer, gradient = ErrorFeedback(PowerSGD(2)), inputs.laplace(LAYOUT.numel)
    old = runs.run(reducer, 1, gradient, LAYOUT)[0].state
    for names in (("v", "b"), ("w",)):
        bucket = Layout(names, tuple(LAYOUT.shapes[LAYOUT.names.index(n)] for n in names), seed=4)
        new = reducer.init(bucket, one_worker())
        state.merge(state.split(old, LAYOUT), new, bucket)
        for name in set(names) - {"b"}:
            kept, was = new["inner"]["factors"][f"tensor {name}"]["q"], old["inner"]["factors"][f"tensor {name}"]["q"]
            assert torch.equal(kept, was)
            assert torch.allclose(kept.t() @ kept, torch.eye(2), atol=1e-6)


@cases(size=[2, 4])
def test_two_all_reduces_of_few_bytes(size):
    def work(comm):
        meter, reducer = Metered(comm), PowerSGD(2)
        x = random(comm.rank, LAYOUT.numel)
        reduce(reducer, Step(LAYOUT), x, torch.empty_like(x), reducer.init(LAYOUT, comm), meter)
        return meter.by_collective

    for by in threads.run(size, work):
        assert list(by) == ["all_reduce"]
        assert by["all_reduce"].calls == 2
        assert by["all_reduce"].payload == 4 * (40 + 2 * (40 + 30) + 2 * (20 + 50))


def test_what_has_no_matrix_in_it_takes_one_dense_all_reduce():
    bucket = Layout(("a", "b", "c"), ((7,), (), (1, 9)))
    gradient = inputs.laplace(bucket.numel)
    ours, dense = (runs.run(reducer, 3, gradient, bucket) for reducer in (PowerSGD(), Dense()))
    assert all(torch.equal(a, b) for a, b in zip(ours[0].means, dense[0].means, strict=True))

    def work(comm):
        meter, x = Metered(comm), gradient(comm.rank, 0)
        reduce(PowerSGD(), Step(bucket), x, x, PowerSGD().init(bucket, comm), meter)
        return meter.total.calls

    assert threads.run(2, work) == [1, 1]


@cases(shape=[(0, 5), (5, 0), (0,)])
def test_empty_tensors_take_part(shape):
    bucket = Layout(("a", "e", "w"), ((3,), shape, (40, 30)))
    reducers.check_step(PowerSGD(), 2, inputs.laplace(bucket.numel), bucket)


@cases(rank=[0, -1, 1.5, True, "2"])
def test_bad_ranks_are_refused(rank):
    with pytest.raises(ValueError, match=r"Write e\.g\. rank=2"):
        PowerSGD(rank)
