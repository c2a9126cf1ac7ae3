"""SIDCo: as many elements as asked for, whatever the gradients look like, and nothing lost on the way."""

import io
import itertools
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from support.cases import cases
from tersegrad.comm import threads
from tersegrad.compressors import BF16, SIDCo
from tersegrad.compressors.sidco import ADAPT_EVERY, CAP, GOAL_RANGE
from tersegrad.compressors.sidco.sample import SAMPLE, Sample, Tail
from tersegrad.core import Layout, Step, accumulate, reduce, state
from tersegrad.reducers import AllGather
from tersegrad.testing import inputs, runs
from tersegrad.wrappers import ErrorFeedback

RATIOS = (0.1, 0.01, 0.001)
LAWS = ("exponential", "gamma", "pareto")
GRADIENTS = Path(__file__).parents[2] / "data" / "gradients_resnet20_cifar10.npz"

every_law = cases(law=LAWS)
every_ratio = cases(ratio=RATIOS)


def tensor(values):
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def fresh(compressor, numel):
    return compressor.init(Layout.flat(numel), 0)


def select(compressor, x, state_):
    """One step of the compressor alone: a copy of the positions, and the step is kept."""
    chosen = compressor.select(x, state_)
    state.commit(state_)
    return chosen.clone()


def sample_of(x):
    return Sample(x, {"calls": 0})


def cap(ratio, numel):
    return math.ceil(CAP * (ratio * numel))


# ---- the threshold -------------------------------------------------------------------------------


@cache
def own_law(law):
    """Two million draws of what the law says magnitudes are, with signs."""
    rng = np.random.default_rng(11)
    n = 2_000_000
    y = {
        "exponential": lambda: rng.exponential(0.01, n),
        "gamma": lambda: rng.gamma(0.8, 0.01, n),
        "pareto": lambda: scipy.stats.genpareto.rvs(0.1, scale=0.01, size=n, random_state=rng),
    }[law]()
    return tensor(y * rng.choice([-1, 1], n))


@every_ratio
@every_law
def test_own_law_at_any_number_of_stages(law, ratio):
    """Later stages of a gamma law are Pareto's, which is nearly the same; its closed-form shape alone costs 2 %."""
    x = own_law(law)
    tolerance = 0.08 if ratio == 0.001 else 0.04 if law == "gamma" else 0.03
    for stages in (1, 2, 3):
        compressor = SIDCo(ratio, law=law, stages=stages)
        count = select(compressor, x, fresh(compressor, x.numel())).numel()
        assert count / (ratio * x.numel()) == pytest.approx(1, abs=tolerance), f"{stages} stages"


@every_ratio
def test_exponential_data_need_no_stages(ratio):
    """Memoryless: the same count with any number of stages, but for the noise of the tail's own mean."""
    x = own_law("exponential")
    sample, target = sample_of(x), ratio * x.numel()
    compressor = SIDCo(ratio)
    counts = [sample.tail(compressor.threshold(sample, target, stages)).count for stages in range(1, 9)]
    noise = math.log(1 / ratio) / math.sqrt(target)
    assert max(counts) - min(counts) <= 3 * noise * target


@dataclass
class Exact:
    """Stands for infinitely many draws of a generalised Pareto law: every fit is exact."""

    xi: float
    numel: int = 10**9

    def tail(self, threshold):
        sigma = 1 + self.xi * threshold
        count = self.numel * scipy.stats.genpareto.sf(threshold, self.xi)
        return Tail(count, sigma / (1 - self.xi), sigma**2 / ((1 - self.xi) ** 2 * (1 - 2 * self.xi)))


@cases(stages=[1, 2, 3, 5, 10])
@every_ratio
@cases("law xi", [("exponential", 0.0), ("pareto", -0.2), ("pareto", 0.3)])
def test_shares_of_the_stages_multiply_to_the_ratio(law, xi, ratio, stages, monkeypatch):
    asked = []

    def recorded(fit):
        def wrapper(self, *moments):
            asked.append(moments[-1])
            return fit(self, *moments)

        return wrapper

    sample = Exact(xi)
    with monkeypatch.context() as patch:
        patch.setattr(SIDCo, "_first", recorded(SIDCo._first))
        patch.setattr(SIDCo, "_stage", recorded(SIDCo._stage))
        threshold = SIDCo(ratio, law=law).threshold(sample, ratio * sample.numel, stages)
    assert threshold == pytest.approx(scipy.stats.genpareto.isf(ratio, xi), rel=1e-9)
    assert math.prod(asked) == pytest.approx(ratio, rel=1e-9)
    assert len(asked) == (stages if ratio < 0.25 else 1)
    assert asked[0] == (ratio if stages == 1 else 0.25)
    assert asked[1:] == pytest.approx(asked[1:2] * (len(asked) - 1))


def test_a_ratio_above_that_of_the_first_stage_takes_one_stage():
    x = own_law("exponential")
    sample = sample_of(x)
    one, five = (SIDCo(0.3).threshold(sample, 0.3 * x.numel(), stages) for stages in (1, 5))
    assert one == five


def test_the_first_stage_keeps_what_it_is_told():
    x = own_law("exponential")
    sample = sample_of(x)
    compressor = SIDCo(0.001, first_ratio=0.05)
    assert compressor._first(sample, sample.tail(0.0), 0.05) == pytest.approx(0.01 * math.log(20), rel=0.01)
    assert compressor.threshold(sample, 0.001 * x.numel(), 2) == pytest.approx(0.01 * math.log(1000), rel=0.02)


def threshold(x, law, stages, ratio=0.01):
    return SIDCo(ratio, law=law).threshold(sample_of(x), ratio * x.numel(), stages)


@cases(stages=[1, 2, 4])
@every_law
def test_threshold_scales_with_the_vector(law, stages):
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(5))
    eta = threshold(x, law, stages)
    for power in (-90, -3, 1, 60):
        scaled = threshold(x * 2.0**power, law, stages)
        if law == "gamma":  # the sum of logarithms is rounded
            assert scaled == pytest.approx(eta * 2.0**power, rel=1e-5)
        else:
            assert scaled == eta * 2.0**power


@cases(stages=[1, 2, 4])
@every_law
def test_threshold_knows_neither_signs_nor_order(law, stages):
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(100_000, generator=generator)
    eta = threshold(x, law, stages)
    assert threshold(-x, law, stages) == eta
    assert threshold(x.abs(), law, stages) == eta
    shuffled = x[torch.randperm(x.numel(), generator=generator)]
    assert threshold(shuffled, law, stages) == pytest.approx(eta, rel=1e-10)  # sums are rounded in another order


def test_moments_of_the_excess():
    tail = sample_of(torch.tensor([0.0, -1.0, 2.0, 3.0, -4.0, 5.0])).tail(2.0)
    assert (tail.count, tail.mean, tail.variance) == (3, 2.0, 1.0)  # of 1, 2 and 3


@every_law
def test_zeros_are_not_fitted(law):
    """Nothing depends on how many zeros there are, except the target that is asked for."""
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(7))
    padded = torch.cat([x, torch.zeros(150_000)])
    for stages in (1, 3):
        with_zeros = SIDCo(0.01, law=law).threshold(sample_of(padded), 500, stages)
        assert with_zeros == pytest.approx(SIDCo(0.01, law=law).threshold(sample_of(x), 500, stages), rel=1e-10)


@every_law
def test_fewer_non_zeros_than_asked_for_are_all_sent(law):
    x = torch.zeros(1000)
    x[[3, 500, 999]] = torch.tensor([1e-30, -2.0, 7.0])
    compressor = SIDCo(0.01, law=law)
    assert select(compressor, x, fresh(compressor, 1000)).tolist() == [3, 500, 999]


# ---- the closed loop -----------------------------------------------------------------------------

N = 200_000
STEPS = 100


def gaussian(rng):
    return rng.standard_normal(N, dtype=np.float32)


def laplace(rng):
    return rng.standard_exponential(N, dtype=np.float32) * np.sign(gaussian(rng))


def student_t3(rng):
    return gaussian(rng) / np.sqrt(rng.standard_gamma(1.5, N, dtype=np.float32) / 1.5)


def fifty_layers(rng):
    scales = np.exp(np.random.default_rng(50).standard_normal(50))  # the same in every step
    return gaussian(rng) * np.repeat(scales, N // 50)


def half_zeros(rng):
    return gaussian(rng) * (rng.random(N, dtype=np.float32) < 0.5)


@cache
def gradients(draw):
    rng = np.random.default_rng(20)
    return [tensor(draw(rng)) for _ in range(STEPS)]


@dataclass
class Run:
    """What a run of one compressor did: elements sent, and stages before and after, at every step."""

    sent: list = field(default_factory=list)
    stages: list = field(default_factory=lambda: [1])
    state: dict = field(default_factory=dict)


def run(compressor, vectors, feedback):
    n = vectors[0].numel()
    done = Run(state=fresh(compressor, n))
    rest = torch.zeros(n)
    for x in vectors:
        total = x + rest if feedback else x
        chosen = select(compressor, total, done.state)
        if feedback:
            rest = total.index_fill_(0, chosen.long(), 0.0)
        done.sent.append(chosen.numel())
        done.stages.append(done.state["stages"])
    return done


def check_run(done, ratio, numel, within=0.1):
    """Density on target after 50 steps, never above the cap, and stages that change as slowly as they should."""
    target = ratio * numel
    assert np.mean(done.sent[50:]) / target == pytest.approx(1, abs=within)  # the cap alone would see to 0.2
    assert max(done.sent) <= cap(ratio, numel)
    assert min(done.stages) >= 1
    assert max(done.stages) <= {0.1: 4, 0.01: 7, 0.001: 10}[ratio]
    for step, (before, after) in enumerate(itertools.pairwise(done.stages), start=1):
        assert abs(after - before) <= (step % ADAPT_EVERY == 0)


@cases(feedback=[True, False])
@every_law
@cases(draw=[gaussian, laplace, student_t3, fifty_layers, half_zeros])
def test_the_loop_finds_the_target(draw, law, feedback):
    for ratio in RATIOS:
        check_run(run(SIDCo(ratio, law=law), gradients(draw), feedback), ratio, N)


@cases(stages=[1, 3, 5])
def test_the_loop_finds_the_target_with_stages_that_are_given(stages):
    done = run(SIDCo(0.01, stages=stages), gradients(fifty_layers), feedback=True)
    assert np.mean(done.sent[50:]) / (0.01 * N) == pytest.approx(1, abs=0.1)
    assert set(done.stages[1:]) == {stages}


@pytest.mark.skipif(not GRADIENTS.exists(), reason="data/gradients_resnet20_cifar10.npz is not there")
@every_law
def test_the_loop_finds_the_target_on_real_gradients(law):
    rng = np.random.default_rng(21)
    with np.load(GRADIENTS) as arrays:
        vectors = [arrays[name] for name in arrays.files if name.startswith(("step", "pretrained"))]
    for x in vectors:
        noise = 0.1 * x.std() * rng.standard_normal(2 * x.size, dtype=np.float32)
        starts = rng.integers(0, x.size, STEPS)
        steps = [tensor(x + noise[start : start + x.size]) for start in starts]
        for ratio in RATIOS:
            check_run(run(SIDCo(ratio, law=law), steps, feedback=True), ratio, x.size, within=0.15)


# ---- long vectors, of which a sample is fitted ----------------------------------------------------

LONG = 2 * SAMPLE + 4321


@cache
def long_vector():
    """Exponential magnitudes, and no two elements alike."""
    rng = np.random.default_rng(22)
    return tensor(rng.standard_exponential(LONG, dtype=np.float32) * rng.choice([-1, 1], LONG))


@every_law
def test_a_sample_is_enough_for_a_law(law):
    x = long_vector()
    for ratio, tolerance in zip(RATIOS, (0.03, 0.04, 0.1), strict=True):
        for stages in (1, 3):
            compressor = SIDCo(ratio, law=law, stages=stages)
            state_ = fresh(compressor, LONG) | {"goal": 0.8}  # away from the cap
            count = select(compressor, x, state_).numel()
            assert count / (0.8 * ratio * LONG) == pytest.approx(1, abs=tolerance), f"ratio {ratio}, {stages} stages"


@every_law
def test_all_elements_above_the_threshold_are_sent_not_only_those_of_the_sample(law):
    x = long_vector()
    compressor = SIDCo(0.001, law=law)
    chosen = select(compressor, x, fresh(compressor, LONG) | {"goal": 0.8})
    sent = torch.zeros(LONG, dtype=torch.bool).index_fill_(0, chosen.long(), True)
    assert x[sent].abs().min() > x[~sent].abs().max()
    assert x.abs().argmax() in chosen


@cases(feedback=[True, False])
def test_the_loop_finds_the_target_by_a_sample(feedback):
    x = long_vector()
    steps = [x.roll(997 * step) for step in range(70)]
    for ratio in (0.01, 0.001):
        check_run(run(SIDCo(ratio, law="pareto"), steps, feedback), ratio, LONG)


@cases(bad=inputs.NONFINITE.values())
def test_nonfinite_elements_outside_the_sample_are_found(bad):
    compressor = SIDCo(0.01)
    for where in (0, 1023, 1024, 2047, LONG - 1):
        x = long_vector().clone()
        x[where] = bad
        state_ = fresh(compressor, LONG)
        before = state.copy(state_)
        assert not compressor.encode(x, state_).finite, f"position {where}"
        state.roll_back(state_)  # as the mean is not finite either
        assert state.copy(state_) == before


# ---- the controller, with a threshold that does as it is told ------------------------------------


@pytest.fixture
def scripted(monkeypatch):
    """``scripted(f)``: of the vector 1, 2, ..., 10000, a threshold lets through f(stages) times the target of 100."""

    def patch(density):
        def threshold(self, sample, goal, stages):
            return 10_000 - 100 * density(stages)

        monkeypatch.setattr(SIDCo, "threshold", threshold)
        return torch.arange(1, 10_001, dtype=torch.float32)

    return patch


def controller(compressor, x, steps):
    """Stages after every step, and the state at the end."""
    state_ = fresh(compressor, x.numel())
    stages = []
    for _ in range(steps):
        select(compressor, x, state_)
        stages.append(state_["stages"])
    return stages, state_


@cases(density=[0.81, 1.0, 1.19])
def test_stages_stay_within_the_tolerance(scripted, density):
    x = scripted(lambda stages: density if stages == 1 else 1.0)  # a better one would be at hand
    assert controller(SIDCo(0.01), x, 30)[0] == [1] * 30


@cases(density=[0.5, 0.79, 1.21, 3.0, 90.0])
def test_stages_change_beyond_the_tolerance(scripted, density):
    x = scripted(lambda stages: density if stages == 1 else 1.0)
    assert controller(SIDCo(0.01), x, 30)[0] == [1] * 4 + [2] * 26


def test_stages_walk_one_at_a_time_to_the_best_and_no_further(scripted):
    x = scripted(lambda stages: [0.1, 0.3, 0.5, 1.0, 2.5, 6.0, 9.0][stages - 1])
    assert controller(SIDCo(0.01), x, 30)[0] == [1] * 4 + [2] * 5 + [3] * 5 + [4] * 16


def test_stages_walk_back(scripted):
    x = scripted({1: 1.0, 2: 1.5, 3: 2.5, 4: 6.0, 5: 9.0}.get)
    compressor = SIDCo(0.01)
    state_ = fresh(compressor, x.numel()) | {"stages": 4}
    seen = []
    for _ in range(20):
        select(compressor, x, state_)
        seen.append(state_["stages"])
    assert seen == [4] * 4 + [3] * 5 + [2] * 5 + [1] * 6


@cases("ratio most", [(0.9, 1), (0.5, 1), (0.3, 2), (0.1, 4), (0.01, 7), (0.001, 10)])
def test_stages_have_a_limit(scripted, ratio, most):
    """Each stage keeps at least half, or there are no more."""
    x = scripted(lambda stages: 50 - 3 * stages)  # always far too many, and one more stage is always better
    stages, _ = controller(SIDCo(ratio), x, 80)
    assert stages[-1] == most
    assert max(stages) == most


def test_another_number_of_stages_starts_without_a_correction(scripted):
    x = scripted(lambda stages: 1.5 if stages == 1 else 1.0)
    assert controller(SIDCo(0.01), x, 4)[1]["goal"] == pytest.approx(1.5**-2)
    assert controller(SIDCo(0.01), x, 5)[1]["goal"] == 1.0


def test_given_stages_are_kept(scripted):
    x = scripted(lambda stages: 3.0 if stages == 2 else 1.0)
    assert set(controller(SIDCo(0.01, stages=2), x, 20)[0]) == {2}


@cases("density limit", [(0, GOAL_RANGE), (0.5, GOAL_RANGE), (90.0, 1 / GOAL_RANGE)])
def test_the_goal_stays_in_range(scripted, density, limit):
    x = scripted(lambda stages: density)
    _, state_ = controller(SIDCo(0.01, stages=1), x, 40)
    assert state_["goal"] == pytest.approx(limit)


def test_the_goal_makes_good_half_of_the_error(scripted):
    x = scripted(lambda stages: 4.0)
    _, state_ = controller(SIDCo(0.01, stages=1), x, 1)
    assert state_["goal"] == pytest.approx(0.5)


@cases(density=[0, 0.01, 0.49])
def test_a_fit_that_lets_too_few_through_gives_way_to_exact_selection(scripted, density):
    x = scripted(lambda stages: density)
    compressor = SIDCo(0.01, stages=1)
    chosen = select(compressor, x, fresh(compressor, x.numel()))
    assert chosen.tolist() == list(range(9_900, 10_000))


@every_law
def test_a_vector_of_zeros_is_an_empty_payload_and_is_counted(law):
    compressor = SIDCo(0.01, law=law)
    payload = compressor.encode(torch.zeros(1000), fresh(compressor, 1000))
    assert payload.finite
    decoded = torch.zeros(1000)
    accumulate(compressor, payload, decoded)
    assert not decoded.any()
    _, state_ = controller(compressor, torch.zeros(1000), 12)
    assert state_["empty"] == 12


def test_a_step_that_is_not_kept_leaves_no_trace():
    compressor, x = SIDCo(0.01), gradients(gaussian)[0]
    state_ = fresh(compressor, N)
    before = state.copy(state_)
    compressor.select(x, state_)
    assert state.copy(state_) == before
    state.roll_back(state_)
    assert state.copy(state_) == before


# ---- the cap, and what stays behind --------------------------------------------------------------


@cases(density=[CAP + 0.01, 10.0, 100.0])
def test_no_more_than_the_cap_and_those_are_the_largest(scripted, density):
    x = scripted(lambda stages: density)
    x = x[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(8))] * torch.tensor([1.0, -1.0]).repeat(
        5000
    )
    compressor = SIDCo(0.01, stages=1)
    chosen = select(compressor, x, fresh(compressor, x.numel()))
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == torch.topk(x.abs(), cap(0.01, 10_000)).indices.sort().values.tolist()


@cases(density=[0.5, 1.0, CAP - 0.01, CAP])
def test_up_to_the_cap_all_that_is_above_is_sent(scripted, density):
    x = scripted(lambda stages: density)
    compressor = SIDCo(0.01, stages=1)
    chosen = select(compressor, x, fresh(compressor, x.numel()))
    assert chosen.tolist() == list(range(10_000 - round(100 * density), 10_000))


@cases(numel=[1, 2, 3, 7, 99, 1001])
@cases(ratio=[0.001, 0.1, 0.34, 0.5, 0.51, 0.99])
def test_the_cap_of_odd_lengths(ratio, numel, monkeypatch):
    monkeypatch.setattr(SIDCo, "threshold", lambda self, sample, goal, stages: 0.0)  # everything comes through
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    compressor = SIDCo(ratio, stages=1)
    chosen = select(compressor, x, fresh(compressor, numel))
    k = min(numel, cap(ratio, numel))
    assert chosen.tolist() == torch.topk(x.abs(), k).indices.sort().values.tolist()


@every_law
def test_what_is_sent_and_what_stays_are_the_whole_bit_for_bit(law):
    """Also at first, when the heavy tail makes one stage of an exponential law let far too many through."""
    reducer = ErrorFeedback(AllGather(SIDCo(0.001, law=law, stages=1)))

    def work(comm):
        bucket = Layout.flat(N)
        state_ = reducer.init(bucket, comm)
        capped = 0
        for x in gradients(student_t3)[:12]:
            total = state_["residual"] + x
            out = torch.empty_like(x)
            reduce(reducer, Step(bucket), x.clone(), out, state_, comm)
            state.commit(state_)
            rest = state_["residual"]
            assert torch.equal(out + rest, total)
            assert not ((out != 0) & (rest != 0)).any()
            sent = int(out.count_nonzero())
            assert sent <= cap(0.001, N)
            if sent == cap(0.001, N):
                capped += 1
                assert out[out != 0].abs().min() >= rest.abs().max()
        return capped

    capped = threads.run(1, work)[0]
    assert capped or law == "pareto"  # the Pareto law is a good one here


# ---- vectors that no law fits --------------------------------------------------------------------


@cases(law=["gamma", "pareto"])
def test_outliers_that_are_almost_equal(law):
    """A share above one of a narrow tail once overflowed."""
    x = torch.full((1000,), 0.1)
    x[:10] = 100 + torch.arange(10) * 1e-3
    run(SIDCo(0.02, law=law), [x] * 30, feedback=True)


@every_law
@cases(x=[torch.ones(1), torch.full((1000,), 0.25), torch.tensor([1.0, -1.0]).repeat(500)])
def test_nothing_is_held_back_for_ever(law, x):
    assert sum(run(SIDCo(0.01, law=law), [x] * 60, feedback=True).sent) > 0


@every_law
def test_loud_columns_of_a_matrix_do_not_resonate_with_the_sample(law):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 1024, 4096), dtype=np.float32)
    rows[:, :, 1024:2048] *= 5
    done = run(SIDCo(0.01, law=law), [tensor(x.reshape(-1)) for x in rows] * 10, feedback=False)
    densities = np.array(done.sent[5:]) / (0.01 * 1024 * 4096)
    assert densities.min() > 0.8
    assert densities.mean() == pytest.approx(1, abs=0.1)


@cases(feedback=[True, False])
@cases(
    "share scale law ratio",
    [
        (0.2, 100, "exponential", 0.001),
        (0.002, 30, "exponential", 0.001),
        (0.02, 30, "exponential", 0.1),
        (0.02, 100, "gamma", 0.1),
    ],
)
def test_two_scales(share, scale, law, ratio, feedback):
    rng = np.random.default_rng(0)
    scales = np.where(rng.random(N) < share, scale, 1).astype(np.float32)
    vectors = [tensor(rng.standard_normal(N, dtype=np.float32) * scales) for _ in range(60)]
    done = run(SIDCo(ratio, law=law), vectors, feedback)
    assert np.mean(done.sent[20:]) / (ratio * N) == pytest.approx(1, abs=0.15)


@every_law
def test_infinity_among_huge_numbers_outside_the_sample(law):
    x = torch.linspace(-1, 1, 2 * SAMPLE) * 3e38
    x[1500] = math.inf
    compressor = SIDCo(0.001, law=law)
    assert not compressor.encode(x, fresh(compressor, x.numel())).finite


# ---- several workers -----------------------------------------------------------------------------


def test_regression_different_counts_with_overlapping_indices_decode_to_the_exact_mean():
    """The public release cuts what was gathered into equal slices, one per worker, although workers send
    different counts: the last elements are lost, and where a slice holds two workers' parts, so are duplicates."""
    numel, size = 4096, 4
    compressor = SIDCo(0.01, stages=1)
    vectors = []
    for rank in range(size):
        rng = np.random.default_rng([30, rank])
        x = np.rint(rng.standard_exponential(numel) * 10 * (1 + rank))  # integers: sums of quarters are exact
        x[100:110] = 1000.0 + rank  # all workers send these, the first a few more of their own
        x[-1] = 5000.0  # and the last element
        vectors.append(tensor(x))

    def work(comm):
        x, out = vectors[comm.rank].clone(), torch.empty(numel)
        bucket = Layout.flat(numel)
        reducer = AllGather(compressor)
        reduce(reducer, Step(bucket), x, out, reducer.init(bucket, comm), comm)
        return x, out

    sent = []
    for x in vectors:
        chosen = select(compressor, x, fresh(compressor, numel)).long()
        sent.append(torch.zeros(numel).index_copy_(0, chosen, x[chosen]))
    counts = [int(s.count_nonzero()) for s in sent]
    assert len(set(counts)) == size, "the counts should differ, or this test shows nothing"
    assert sum((s != 0).int() for s in sent).max() == size, "all workers should share some positions"
    for rank, (rest, out) in enumerate(threads.run(size, work)):
        assert torch.equal(out, sum(sent) / size)
        assert torch.equal(rest, vectors[rank] - sent[rank])


def test_workers_may_differ_in_stages_and_goal():
    """What the controller knows is each worker's own."""
    traces = runs.run(
        ErrorFeedback(AllGather(SIDCo(0.01))),
        2,
        lambda rank, step: gradients(fifty_layers if rank else gaussian)[step].clone(),
        layout=Layout.flat(N),
        steps=25,
    )
    goals = [trace.state["inner"]["goal"] for trace in traces]
    assert goals[0] != goals[1]
    assert torch.equal(traces[0].means[-1], traces[1].means[-1])


# ---- inputs that fit no law ----------------------------------------------------------------------

DEGENERATE = {
    **{name: x for name, x in inputs.DEGENERATE.items() if name not in ("huge", "largest")},
    "two elements": torch.tensor([1.0, -1e-20]),
    "nine elements": torch.tensor([3.0, -1.0, 4.0, -1.0, 5.0, -9.0, 2.0, -6.0, 5.0]),
    "signs": torch.tensor([1.0, -1.0]).repeat(500),
    "two levels": torch.cat([torch.full((900,), 1e-3), torch.full((100,), 1.0)]),
    "many zeros": torch.where(torch.arange(1000) % 97 == 0, torch.linspace(-1, 1, 1000), torch.tensor(0.0)),
    "least denormal": torch.full((1000,), 2.0**-149),
    "all exponents": 2.0 ** torch.linspace(-149, 120, 1000),
    "huge": torch.linspace(-1, 1, 1000) * 1e37,  # 30 of them still add up to a number
    "large and equal": torch.full((1000,), 1e37),
}


@cases(feedback=[True, False])
@every_law
@cases(name=DEGENERATE)
def test_degenerate_input(name, law, feedback, monkeypatch):
    x = DEGENERATE[name]
    etas = []
    original = SIDCo.threshold

    def threshold(self, *arguments):
        etas.append(original(self, *arguments))
        return etas[-1]

    with monkeypatch.context() as patch:
        patch.setattr(SIDCo, "threshold", threshold)
        for ratio, stages in itertools.product((0.3, 0.01, 0.001), ("adaptive", 3)):
            done = run(SIDCo(ratio, law=law, stages=stages), [x] * 30, feedback)
            assert max(done.sent) <= min(x.numel(), cap(ratio, x.numel()))
            assert all(math.isfinite(done.state[key]) for key in ("goal", "stages", "achieved"))
    assert all(eta >= 0 and math.isfinite(eta) for eta in etas)
    assert etas or x.numel() == 0


@cases(bad=inputs.NONFINITE.values())
@cases(where=[0, 77, 999])
@every_law
def test_nonfinite_input_is_never_fitted(law, where, bad, monkeypatch):
    compressor = SIDCo(0.01, law=law)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(9))
    state_ = fresh(compressor, 1000)
    for _ in range(7):
        select(compressor, x, state_)
    before = state.copy(state_)

    def threshold(self, *arguments):
        raise AssertionError("a law was fitted to a vector that is not finite")

    x[where] = bad
    with monkeypatch.context() as patch:
        patch.setattr(SIDCo, "threshold", threshold)
        payload = compressor.encode(x, state_)
    assert not payload.finite
    for end in (state.roll_back, state.commit):  # even if somebody commits the step
        end(state_)
        assert state.copy(state_) == before


@every_law
def test_numbers_that_add_up_to_more_than_float32_are_finite(law):
    x = torch.linspace(-1, 1, 1000) * 3e38
    compressor = SIDCo(0.05, law=law)
    assert compressor.encode(x, fresh(compressor, 1000)).finite


# ---- the spec, and its state ---------------------------------------------------------------------


@cases(ratio=[0, 0.0, -0.1, 2, math.nan, math.inf, True, "0.01"])
def test_bad_ratio(ratio):
    with pytest.raises(ValueError, match=r"above 0 and at most 1.*SIDCo\(ratio=0\.01\)"):
        SIDCo(ratio)
    with pytest.raises(ValueError, match=r"SIDCo\(first_ratio=.*above 0 and at most 1"):
        SIDCo(0.01, first_ratio=ratio)


def test_bad_law():
    with pytest.raises(ValueError, match=r"law='normal'.*'exponential', 'gamma', 'pareto'"):
        SIDCo(0.01, law="normal")


@cases(stages=[0, -1, 2.5, "many", None, True])
def test_bad_stages(stages):
    with pytest.raises(ValueError, match='a number from 1 on, or "adaptive"'):
        SIDCo(0.01, stages=stages)


def test_bad_values():
    with pytest.raises(TypeError, match=r"values must be a compressor.*values=BF16\(\)"):
        SIDCo(0.01, values="bf16")
    with pytest.raises(ValueError, match="would drop values after they were selected"):
        SIDCo(0.01, values=SIDCo(0.1))


@cases(after=[1, 7, 20])  # before the first look at the stages, between two, and at one
@every_law
def test_checkpoint_of_the_controller(law, after):
    compressor = SIDCo(0.01, law=law, values=BF16())
    vectors = [x[:20_000].contiguous() for x in gradients(student_t3)[:40]]
    state_ = fresh(compressor, 20_000)
    for x in vectors[:after]:
        select(compressor, x, state_)
    file = io.BytesIO()
    torch.save(state.copy(state_), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    bucket = Layout.flat(20_000)
    resumed = fresh(compressor, 20_000)
    state.merge(state.split(loaded, bucket), resumed, bucket)
    for x in vectors[after:]:
        assert torch.equal(select(compressor, x, state_), select(compressor, x, resumed))
        assert state.copy(state_) == state.copy(resumed)
    assert state_["stages"] > 1 or law == "pareto", "something should have been learned"
