"""The laws of reducers (``tersegrad.core``): each function runs one and raises AssertionError if a law is broken."""

import io
import random

import numpy as np
import torch
from torch import Tensor

from tersegrad import local
from tersegrad import state as states
from tersegrad.core import Bucket, Comm, Finish, Reducer
from tersegrad.taps import Metered
from tersegrad.testing.inputs import BUCKET, DEGENERATE, GRADIENT, NONFINITE, Gradient, learning_rate, squares
from tersegrad.testing.runs import Trace, assert_close, finish, largest, mean, run, same


def tolerance(reducer: Reducer, scale: float, size: int, lost: float = 0.25) -> float:
    """Rounding of float32 sums; or ``lost``, for a reducer that throws something away on purpose."""
    return scale * (2.0**-20 * size if reducer.conserves else lost) + size * 2.0**-148  # and of denormals


# ---- what a run must have shown ------------------------------------------------------------------


def assert_conserved(traces: list[Trace], reducer: Reducer, lost: float = 0.25) -> None:
    """Mean of what left x and memory == out, at every step; nothing appears, nothing is lost (or just so much)."""
    atol = tolerance(reducer, 4 * largest(traces), len(traces), lost)
    before = [torch.zeros_like(t.means[0]) for t in traces]
    for step in range(len(traces[0].means)):
        left = [
            t.gradients[step].double() + b.double() - t.rests[step].double() - t.held[step].double()
            for t, b in zip(traces, before, strict=True)
        ]
        assert_close(traces[0].means[step], mean(left), atol, f"conservation at step {step}")
        before = [t.held[step] for t in traces]


def assert_identical(traces: list[Trace]) -> None:
    """The same bits on every worker."""
    for trace in traces[1:]:
        for step, (a, b) in enumerate(zip(traces[0].means, trace.means, strict=True)):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32)), f"replicas differ at step {step}"


def assert_same_means(traces: list[Trace], others: list[Trace], what: str) -> None:
    """Two runs gave the same."""
    for step, (a, b) in enumerate(zip(traces[0].means, others[0].means, strict=True)):
        assert torch.equal(a, b), f"{what} at step {step}"


# ---- the laws ------------------------------------------------------------------------------------


def check_step(reducer: Reducer, size: int, gradient: Gradient = GRADIENT, bucket: Bucket = BUCKET) -> list[Trace]:
    """The law: nothing is lost, all workers hold the same bits; nobody's random numbers have changed."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index] # noqa: NPY002
    traces = run(reducer, size, gradient, bucket)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index] # noqa: NPY002
    assert torch.equal(before[0], after[0]), "torch's global generator was used"
    assert before[1] == after[1], "numpy's global generator was used"
    assert before[2] == after[2], "random's global generator was used"
    assert_conserved(traces, reducer)
    assert_identical(traces)
    return traces


def check_in_place(reducer: Reducer, size: int, gradient: Gradient = GRADIENT) -> None:
    """``out`` may be ``x``: the mean does not change by it."""
    together = run(reducer, size, gradient, in_place=True)
    assert_same_means(run(reducer, size, gradient), together, "reducing in place gives another mean")


def check_overlap(reducer: Reducer, size: int = 3, gradient: Gradient = GRADIENT, steps: int = 3) -> None:
    """A second bucket may be started before the first one is finished, on some workers and not on others."""

    def work(comm: Comm, overlaps: bool) -> list[Tensor]:
        buckets = [Bucket(tuple(f"{i}.{name}" for name in BUCKET.names), BUCKET.shapes) for i in range(2)]
        memory = [reducer.init(bucket, comm) for bucket in buckets]
        means: list[Tensor] = []
        for step in range(steps):
            unfinished: list[tuple[Finish, Tensor]] = []
            for bucket, state in zip(buckets, memory, strict=True):
                x = gradient(comm.rank, len(means))
                bucket.step, bucket.squares, bucket.lr = step, squares(x), learning_rate(step)
                unfinished.append((reducer.start(bucket, x, x, state, comm), x))
                means.append(x)
                if not overlaps:
                    finish(*unfinished.pop())
            for rest, mean_of_it in unfinished:
                finish(rest, mean_of_it)
            for state in memory:
                states.settle(state, keep=True)
        return means

    one_by_one = local.run(size, lambda comm: work(comm, overlaps=False))
    overlapping = local.run(size, lambda comm: work(comm, overlaps=comm.rank % 2 == 0))
    for rank, (a, b) in enumerate(zip(one_by_one, overlapping, strict=True)):
        same_bits = all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))
        assert same_bits, f"rank {rank}: a bucket that is started while another is under way gets another mean"


def check_sum(reducer: Reducer, size: int = 2, gradient: Gradient = GRADIENT) -> None:
    """A vector that is added up on the way is reduced as if it had been added up before."""

    def work(comm: Comm, on_the_way: bool) -> tuple[Tensor, Tensor]:
        bucket, (a, b) = Bucket(BUCKET.names, BUCKET.shapes), (gradient(comm.rank, step) for step in (0, 1))
        bucket.squares, bucket.lr = squares(a + b), 0.1
        total, state = torch.add(a, b), reducer.init(bucket, comm)
        if on_the_way:
            rest = reducer.start_sum(bucket, a, b, total.fill_(torch.nan), b, state, comm)
        else:
            rest = reducer.start(bucket, total, b, state, comm)
        finish(rest, b)
        return b, total

    added_before = local.run(size, lambda comm: work(comm, on_the_way=False))
    added_on_the_way = local.run(size, lambda comm: work(comm, on_the_way=True))
    for before, on_the_way in zip(added_before, added_on_the_way, strict=True):
        assert torch.equal(before[0], on_the_way[0]), "a sum that is made on the way has another mean"
        assert torch.equal(before[1], on_the_way[1]), "of a sum that is made on the way something else is left"


def check_telescoping(reducer: Reducer, size: int, gradient: Gradient = GRADIENT, steps: int = 8) -> None:
    """Sum of means + mean memory == sum of mean gradients, for reducers that remember all they do not send."""
    traces = run(reducer, size, gradient, steps=steps)
    sent = torch.stack(traces[0].means).double().sum(0)
    late = mean([t.held[-1] for t in traces])
    total = mean([torch.stack(t.gradients).double().sum(0) for t in traces])
    assert_close(sent + late, total, tolerance(reducer, steps * largest(traces), size), "telescoping sum")


def check_stays_inside(reducer: Reducer, size: int = 2, gradient: Gradient = GRADIENT) -> None:
    """Memory around ``x`` and ``out`` is not touched."""
    n, guard = BUCKET.numel, 64

    def work(comm: Comm) -> None:
        big_x, big_out = torch.full((2, n + 2 * guard), 77.0)
        x, out = big_x[guard : guard + n], big_out[guard : guard + n]
        x.copy_(gradient(comm.rank, 0))
        bucket = Bucket(BUCKET.names, BUCKET.shapes, squares=squares(x), lr=0.1)
        reducer.reduce(bucket, x, out, reducer.init(bucket, comm), comm)
        for big in (big_x, big_out):
            around = torch.cat([big[:guard], big[guard + n :]])
            assert bool((around == 77.0).all()), "memory outside x or out was written"

    local.run(size, work)


def check_state(reducer: Reducer, size: int = 2, gradient: Gradient = GRADIENT) -> None:
    """The rules of state: saved with torch.save, loaded with weights_only, cut by name and joined, all goes on alike.

    And keys that begin with _ may vanish between steps; and two runs give the same bits.
    """
    whole = run(reducer, size, gradient, steps=5)
    half = run(reducer, size, gradient, steps=3, between=states.drop_scratch)
    for step in range(3):
        assert torch.equal(whole[0].means[step], half[0].means[step]), (
            f"step {step} of a second run, with scratch dropped between steps, differs"
        )
    buffer = io.BytesIO()
    torch.save([states.copy(t.state) for t in half], buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    check_cutting(reducer, half)
    resumed = run(reducer, size, gradient, steps=2, first=3, states_before=loaded)
    for step in (0, 1):
        same_mean = torch.equal(whole[0].means[3 + step], resumed[0].means[step])
        assert same_mean, f"a resumed run differs in step {3 + step}"


def check_cutting(reducer: Reducer, traces: list[Trace]) -> None:
    """Cutting a state by name and joining it again gives it back."""

    def work(comm: Comm) -> None:
        state = traces[comm.rank].state
        fresh = reducer.init(BUCKET, comm)
        states.paste(states.cut(state, BUCKET), fresh, BUCKET)
        assert same(states.copy(state), states.copy(fresh)), (
            "a state that was cut by name and joined again is another state"
        )

    local.run(len(traces), work)


def check_degenerate(reducer: Reducer, x: Tensor, size: int = 2) -> None:
    """Nothing raises, nothing becomes non-finite, the law holds."""
    traces = run(reducer, size, lambda rank, step: x.clone(), Bucket.flat(x.numel()))
    for trace in traces:
        assert all(bool(m.isfinite().all()) for m in trace.means), "finite gradients gave a non-finite mean"
        assert all(bool(h.isfinite().all()) for h in trace.held), "finite gradients gave a non-finite memory"
    assert_conserved(traces, reducer)
    assert_identical(traces)


def check_nonfinite(reducer: Reducer, bad: float, where: int, size: int = 3, gradient: Gradient = GRADIENT) -> None:
    """One bad value on the last worker: every worker's mean is non-finite, every memory is what it was before."""

    def poisoned(rank: int, step: int) -> Tensor:
        x = gradient(rank, step)
        if step == 1 and rank == size - 1:
            x[where] = bad
        return x

    for rank, trace in enumerate(run(reducer, size, poisoned)):
        assert not bool(trace.means[1].isfinite().all()), (
            f"rank {rank} was given a finite mean of a non-finite gradient"
        )
        assert torch.equal(trace.held[1], trace.held[0]), f"rank {rank}'s memory was changed by a non-finite gradient"
        assert bool(trace.means[2].isfinite().all()), f"rank {rank} did not recover from a non-finite gradient"


def check_dtypes(reducer: Reducer) -> None:
    """A reducer that says it takes every float dtype does; the mean keeps the dtype."""
    if not reducer.any_dtype:
        return
    for dtype in (torch.bfloat16, torch.float16, torch.float64):

        def work(comm: Comm, dtype: torch.dtype = dtype) -> Tensor:
            bucket = Bucket(BUCKET.names, BUCKET.shapes)
            x = GRADIENT(comm.rank, 0).to(dtype)
            reducer.reduce(bucket, x, x, reducer.init(bucket, comm), comm)
            return x

        out = local.run(2, work)[0]
        want = mean([GRADIENT(rank, 0) for rank in range(2)])
        assert out.dtype == dtype, f"a bucket of {dtype} came back as {out.dtype}"
        assert_close(out, want, 2.0**-6 * float(want.abs().max()), f"the mean of a {dtype} bucket")


def check_counted(reducer: Reducer, size: int = 2) -> None:
    """Everything that two workers tell each other goes through the Comm that counts: without it no mean."""

    def work(comm: Comm) -> int:
        metered = Metered(comm)
        bucket = Bucket(BUCKET.names, BUCKET.shapes, seed=BUCKET.seed)
        x = GRADIENT(comm.rank, 0)
        bucket.squares, bucket.lr = squares(x), 0.1
        reducer.reduce(bucket, x, torch.empty_like(x), reducer.init(bucket, metered), metered)
        return metered.total.sent

    assert all(sent > 0 for sent in local.run(size, work)), "a mean over two workers, and no byte was sent"


def check_reducer(reducer: Reducer, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> None:
    """All laws of reducers."""
    for size in sizes:
        check_step(reducer, size)
    check_in_place(reducer, max(sizes))
    check_overlap(reducer, max(sizes))
    check_sum(reducer)
    if reducer.remembers:
        check_telescoping(reducer, max(sizes))
    check_stays_inside(reducer)
    check_state(reducer)
    check_dtypes(reducer)
    check_counted(reducer)
    for x in DEGENERATE.values():
        check_degenerate(reducer, x)
    for where, bad in zip((0, 700, -1), NONFINITE.values(), strict=True):
        check_nonfinite(reducer, bad, where)
