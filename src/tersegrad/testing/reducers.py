"""The laws of reducers (``tersegrad.core``): each function runs one and raises AssertionError if a law is broken."""

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tersegrad.comm import threads
from tersegrad.comm.metered import Metered, Tap
from tersegrad.comm.traffic import Traffic
from tersegrad.core import (
    Comm,
    Composite,
    Finish,
    Layout,
    Memory,
    Reducer,
    State,
    Step,
    Sum,
    Vector,
    Wrapper,
    contribution,
    needs_of,
    reduce,
    remembers,
)
from tersegrad.core import state as states
from tersegrad.testing.inputs import (
    DEGENERATE,
    GRADIENT,
    LARGE,
    LAYOUT,
    NONFINITE,
    Gradient,
    laplace,
    learning_rate,
    squares,
)
from tersegrad.testing.runs import Trace, assert_close, finish, held, largest, mean, run, same

MOST_LOST = 0.5  # a reducer that may throw away more than that is not one


def tolerance(reducer: Reducer, scale: float, size: int) -> float:
    """Rounding of float32 sums, and as much as the reducer states that it may lose."""
    loses = reducer.loses(size)
    assert 0 <= loses <= MOST_LOST, f"{reducer!r} states that it may lose {loses}: more than {MOST_LOST} is no mean"
    denormal = 2.0**-126 if loses else size * 2.0**-148  # a narrower float has wider steps there
    return scale * (4 * 2.0**-20 * size + loses) + denormal


# ---- what a run must have shown ------------------------------------------------------------------


def assert_conserved(traces: list[Trace], reducer: Reducer, typical: bool = True) -> None:
    """Mean of what left x and residual == out, at every step; nothing appears, nothing is lost but what is stated.

    ``typical``: the gradients have all kinds of elements, so that rounding goes both ways.
    """
    before = [torch.zeros_like(t.means[0]) for t in traces]
    for step in range(len(traces[0].means)):
        scale = max(largest(traces, step), _largest(before))
        atol = tolerance(reducer, scale, len(traces))
        left = mean(
            [
                t.inputs[step].double() + b.double() - t.rests[step].double() - t.held[step].double()
                for t, b in zip(traces, before, strict=True)
            ]
        )
        assert_close(traces[0].means[step], left, atol, f"conservation at step {step}")
        if typical:
            assert_not_scaled(traces[0].means[step], left, reducer, len(traces), step, scale)
        before = [t.held[step] for t in traces]


def _largest(tensors: list[Tensor]) -> float:
    return max((float(t.abs().max()) for t in tensors if t.numel()), default=0.0)


def assert_not_scaled(out: Tensor, left: Tensor, reducer: Reducer, size: int, step: int, scale: float) -> None:
    """What a reducer may lose is rounding: over a whole vector the mean is neither larger nor smaller by so much."""
    energy, loses = float(left.square().sum()), reducer.loses(size)
    meant = energy > 2.0**-20 * scale**2 and scale > 2.0**-100  # else nothing was sent but rounding
    if loses and meant and out.numel() >= 1000:
        gain = float((out.double() * left).sum()) / energy
        allowed = loses / 2 + 2.0**-16
        assert abs(gain - 1) <= allowed, f"the mean at step {step} is {gain:.4g} times what left the workers"


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


def check_step(
    reducer: Reducer, size: int, gradient: Gradient = GRADIENT, layout: Layout = LAYOUT, steps: int = 3
) -> list[Trace]:
    """The law: nothing is lost, all workers hold the same bits; nobody's random numbers have changed."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index] # noqa: NPY002
    traces = run(reducer, size, gradient, layout, steps)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index] # noqa: NPY002
    assert torch.equal(before[0], after[0]), "torch's global generator was used"
    assert before[1] == after[1], "numpy's global generator was used"
    assert before[2] == after[2], "random's global generator was used"
    assert_conserved(traces, reducer)
    assert_identical(traces)
    has_residual = any(bool(h.any()) for t in traces for h in t.held)
    assert not has_residual or remembers(reducer), "it has a residual, and nothing in it is a Memory"
    return traces


def check_in_place(
    reducer: Reducer, size: int, gradient: Gradient = GRADIENT, layout: Layout = LAYOUT, steps: int = 3
) -> None:
    """``out`` may be ``x``: the mean does not change by it."""
    together = run(reducer, size, gradient, layout, steps, in_place=True)
    assert_same_means(run(reducer, size, gradient, layout, steps), together, "reducing in place gives another mean")


def check_overlap(reducer: Reducer, size: int = 3, gradient: Gradient = GRADIENT, steps: int = 3) -> None:
    """A second bucket may be started before the first one is finished, on some workers and not on others."""

    def work(comm: Comm, overlaps: bool) -> list[Tensor]:
        layouts = [Layout(tuple(f"{i}.{name}" for name in LAYOUT.names), LAYOUT.shapes) for i in range(2)]
        memory = [reducer.init(layout, comm) for layout in layouts]
        means: list[Tensor] = []
        for number in range(steps):
            unfinished: list[tuple[Finish, Tensor]] = []
            for layout, state in zip(layouts, memory, strict=True):
                x = gradient(comm.rank, len(means))
                step = Step(layout, number, learning_rate(number), squares(x))
                unfinished.append((reducer.start(step, x, x, state, comm), x))
                means.append(x)
                if not overlaps:
                    finish(*unfinished.pop())
            for rest, mean_of_it in unfinished:
                finish(rest, mean_of_it)
            for state in memory:
                states.commit(state)
        return means

    one_by_one = threads.run(size, lambda comm: work(comm, overlaps=False))
    overlapping = threads.run(size, lambda comm: work(comm, overlaps=comm.rank % 2 == 0))
    for rank, (a, b) in enumerate(zip(one_by_one, overlapping, strict=True)):
        same_bits = all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))
        assert same_bits, f"rank {rank}: a bucket that is started while another is under way gets another mean"


def check_sum(reducer: Reducer, size: int = 2, gradient: Gradient = GRADIENT, layout: Layout = LAYOUT) -> None:
    """A vector that is added up on the way is reduced as if it had been added up before."""

    def work(comm: Comm, on_the_way: bool) -> tuple[Tensor, Tensor]:
        a, b = (gradient(comm.rank, number) for number in (0, 1))
        step = Step(layout, 0, 0.1, squares(a + b))
        total, state = torch.add(a, b), reducer.init(layout, comm)
        x: Vector = Sum(a, b, total.fill_(torch.nan)) if on_the_way else total
        finish(reducer.start(step, x, b, state, comm), b)
        return b, total

    added_before = threads.run(size, lambda comm: work(comm, on_the_way=False))
    added_on_the_way = threads.run(size, lambda comm: work(comm, on_the_way=True))
    for before, on_the_way in zip(added_before, added_on_the_way, strict=True):
        assert torch.equal(before[0], on_the_way[0]), "a sum that is made on the way has another mean"
        assert torch.equal(before[1], on_the_way[1]), "of a sum that is made on the way something else is left"


def check_wrapper(reducer: Reducer, size: int = 2, steps: int = 3) -> None:
    """A reducer around others starts what they start: it waits for nothing in ``start`` if they do not.

    And it leaves a ``Sum`` to them, unless it has a residual to add itself.
    """
    if isinstance(reducer, Composite):
        inner = [part for part in reducer.walk() if isinstance(part, Reducer) and not isinstance(part, Composite)]
        if not any(_waits(part, size, steps) for part in inner):
            assert not _waits(reducer, size, steps), "it waits in start(), and nothing inside it does"
    if isinstance(reducer, Wrapper) and not isinstance(reducer, Memory):
        own, inners = (_additions(part, size) for part in (reducer, reducer.inner))
        assert own <= inners, "it adds a Sum up, which what is inside it would do in the pass that encodes"


class _Waits(Tap):
    """Counts what was waited for."""

    count = 0

    def observe(self, traffic: Traffic, started: float, overlapped: float = 0.0) -> None:
        self.count += 1


def _waits(reducer: Reducer, size: int, steps: int) -> int:
    """How often ``start`` waits."""

    def work(comm: Comm) -> int:
        tap, state, count = _Waits(comm), reducer.init(LAYOUT, comm), 0
        for number in range(steps):
            x = GRADIENT(comm.rank, number)
            before = tap.count
            rest = reducer.start(Step(LAYOUT, number, 0.1, squares(x)), x, x, state, tap)
            count += tap.count - before
            finish(rest, x)
            states.commit(state)
        return count

    return max(threads.run(size, work))


def _additions(reducer: Reducer, size: int) -> int:
    """How often a ``Sum`` is added up before it is encoded."""
    with _counting_additions() as additions:

        def work(comm: Comm) -> None:
            a, b = (GRADIENT(comm.rank, number) for number in (0, 1))
            step, state = Step(LAYOUT, 0, 0.1, squares(a + b)), reducer.init(LAYOUT, comm)
            finish(reducer.start(step, Sum(a, b, torch.empty_like(a)), b, state, comm), b)

        threads.run(size, work)
    return len(additions)


@contextmanager
def _counting_additions() -> Iterator[list[None]]:
    additions: list[None] = []
    add = Sum.add

    def counted(self: Sum) -> Tensor:
        additions.append(None)
        return add(self)

    with mock.patch.object(Sum, "add", counted):
        yield additions


def remembers_all(reducer: Reducer) -> bool:
    """Whether all that it does not send is in one residual: a Memory, or wrappers around one."""
    while isinstance(reducer, Wrapper) and not isinstance(reducer, Memory):
        reducer = reducer.inner
    return isinstance(reducer, Memory)


def check_telescoping(reducer: Reducer, size: int, gradient: Gradient = GRADIENT, steps: int = 8) -> None:
    """Sum of means + mean residual == sum of mean gradients, for reducers that remember all they do not send."""
    traces = run(reducer, size, gradient, steps=steps)
    sent = torch.stack(traces[0].means).double().sum(0)
    late = mean([t.held[-1] for t in traces])
    total = mean([torch.stack(t.inputs).double().sum(0) for t in traces])
    assert_close(sent + late, total, tolerance(reducer, steps * largest(traces), size), "telescoping sum")


def check_idle(reducer: Reducer, size: int = 2, gradient: Gradient = GRADIENT, layout: Layout = LAYOUT) -> None:
    """What is remembered of a tensor that no worker used stays, to the bit; nothing is lost of one that some used."""
    name = layout.names[0]

    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        state = reducer.init(layout, comm)
        for number in range(3):
            _idle_step(reducer, layout, gradient(comm.rank, number), number, frozenset(), state, comm)
            states.commit(state)
        before = held(reducer, state, layout)
        _idle_step(reducer, layout, gradient(comm.rank, 3), 3, frozenset([name]), state, comm)
        states.hold(state, layout, {name})
        states.commit(state)
        after = held(reducer, state, layout)
        for part in layout.ranges({name}):
            assert torch.equal(before[part], after[part]), f"the residual of {name}, which nobody used, has changed"
        idle = frozenset([name]) if comm.rank == 0 else frozenset[str]()
        given, rest, out = _idle_step(reducer, layout, gradient(comm.rank, 4), 4, idle, state, comm)
        states.commit(state)
        left = after.double() + given.double() - rest.double() - held(reducer, state, layout).double()
        return left, out

    found = threads.run(size, work)
    out = found[0][1]
    scale = max(_largest([out]), *(_largest([left]) for left, _ in found), 1.0)
    assert_close(out, mean([left for left, _ in found]), tolerance(reducer, scale, size), "conservation, some idle")


def _idle_step(
    reducer: Reducer, layout: Layout, x: Tensor, number: int, idle: frozenset[str], state: State, comm: Comm
) -> tuple[Tensor, Tensor, Tensor]:
    """One step in which a worker has no gradient of some tensors: what is contributed, the rest, and the mean."""
    for part in layout.ranges(idle):
        x[part] = 0.0
    given, out = contribution(reducer, layout, state, x.clone(), comm.size).clone(), torch.empty_like(x)
    for part in layout.ranges(idle):
        given[part] = 0.0
    step = Step(layout, number, learning_rate(number), squares(x), idle)
    finish(reducer.start(step, x, out, state, comm), out)
    return given, x, out


def check_stays_inside(reducer: Reducer, size: int = 2, gradient: Gradient = GRADIENT) -> None:
    """Memory around ``x`` and ``out`` is not touched."""
    n, guard = LAYOUT.numel, 64

    def work(comm: Comm) -> None:
        big_x, big_out = torch.full((2, n + 2 * guard), 77.0)
        x, out = big_x[guard : guard + n], big_out[guard : guard + n]
        x.copy_(gradient(comm.rank, 0))
        reduce(reducer, Step(LAYOUT, 0, 0.1, squares(x)), x, out, reducer.init(LAYOUT, comm), comm)
        for big in (big_x, big_out):
            around = torch.cat([big[:guard], big[guard + n :]])
            assert bool((around == 77.0).all()), "memory outside x or out was written"

    threads.run(size, work)


def check_state(reducer: Reducer, size: int = 2, gradient: Gradient = GRADIENT) -> None:
    """The rules of state: saved with torch.save, loaded with weights_only, split by name, merged: all goes on alike.

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
    check_splitting(reducer, half)
    resumed = run(reducer, size, gradient, steps=2, first=3, states_before=loaded)
    for step in (0, 1):
        same_mean = torch.equal(whole[0].means[3 + step], resumed[0].means[step])
        assert same_mean, f"a resumed run differs in step {3 + step}"


def check_splitting(reducer: Reducer, traces: list[Trace]) -> None:
    """Splitting a state by name and merging it again gives it back."""

    def work(comm: Comm) -> None:
        state = traces[comm.rank].state
        fresh = reducer.init(LAYOUT, comm)
        states.merge(states.split(state, LAYOUT), fresh, LAYOUT)
        assert same(states.copy(state), states.copy(fresh)), (
            "a state that was split by name and merged again is another state"
        )

    threads.run(len(traces), work)


def check_degenerate(reducer: Reducer, x: Tensor, size: int = 3) -> None:
    """Nothing raises, nothing becomes non-finite, the law holds."""
    traces = run(reducer, size, lambda rank, step: x.clone(), Layout.flat(x.numel()), steps=2)
    for trace in traces:
        assert all(bool(m.isfinite().all()) for m in trace.means), "finite gradients gave a non-finite mean"
        assert all(bool(h.isfinite().all()) for h in trace.held), "finite gradients gave a non-finite residual"
    assert_conserved(traces, reducer, typical=False)
    assert_identical(traces)


def check_nonfinite(reducer: Reducer, bad: float, where: int, size: int = 3, gradient: Gradient = GRADIENT) -> None:
    """One bad value on the last worker: every worker's mean is non-finite, every residual is what it was before."""

    def spoilt(rank: int, step: int) -> Tensor:
        x = gradient(rank, step)
        if step == 1 and rank == size - 1:
            x[where] = bad
        return x

    for rank, trace in enumerate(run(reducer, size, spoilt)):
        assert not bool(trace.means[1].isfinite().all()), (
            f"rank {rank} was given a finite mean of a non-finite gradient"
        )
        assert torch.equal(trace.held[1], trace.held[0]), f"rank {rank}'s residual was changed by a non-finite gradient"
        assert bool(trace.means[2].isfinite().all()), f"rank {rank} did not recover from a non-finite gradient"


def check_dtypes(reducer: Reducer) -> None:
    """A reducer that does not need float32 takes every float dtype; the mean keeps the dtype."""
    if needs_of(reducer).float32:
        return
    for dtype in (torch.bfloat16, torch.float16, torch.float64):

        def work(comm: Comm, dtype: torch.dtype = dtype) -> Tensor:
            x = GRADIENT(comm.rank, 0).to(dtype)
            reduce(reducer, Step(LAYOUT), x, x, reducer.init(LAYOUT, comm), comm)
            return x

        out = threads.run(2, work)[0]
        want = mean([GRADIENT(rank, 0) for rank in range(2)])
        assert out.dtype == dtype, f"a bucket of {dtype} came back as {out.dtype}"
        assert_close(out, want, 2.0**-6 * float(want.abs().max()), f"the mean of a {dtype} bucket")


def check_counted(reducer: Reducer, size: int = 2, steps: int = 3) -> None:
    """Every byte that a worker gives to another goes through the Comm that counts: it counts what really crossed."""

    def work(comm: threads.ThreadComm) -> tuple[int, int, int]:
        metered = Metered(comm)
        state: State = reducer.init(LAYOUT, metered)
        for number in range(steps):
            x = GRADIENT(comm.rank, number)
            reduce(reducer, Step(LAYOUT, number, 0.1, squares(x)), x, x, state, metered)
            states.commit(state)
        return metered.total.payload, comm.handed_over, metered.total.sent

    for rank, (counted, crossed, sent) in enumerate(threads.run(size, work)):
        assert counted == crossed, f"rank {rank} gave {crossed} bytes to others, and {counted} were counted"
        assert sent > 0, "a mean over two workers, and no byte was sent"


def check_large(reducer: Reducer, size: int = 2, layout: Layout = LARGE, steps: int = 2) -> None:
    """The law at the size of real buckets, where other kernels are at work."""
    gradient = laplace(layout.numel)
    check_step(reducer, size, gradient, layout, steps)
    check_in_place(reducer, size, gradient, layout, steps)
    check_sum(reducer, size, gradient, layout)


def check_reducer(reducer: Reducer, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> None:
    """All laws of reducers."""
    for size in sizes:
        check_step(reducer, size)
    check_in_place(reducer, max(sizes))
    check_overlap(reducer, max(sizes))
    check_sum(reducer)
    check_wrapper(reducer)
    if remembers_all(reducer):
        check_telescoping(reducer, max(sizes))
        check_idle(reducer)
    check_stays_inside(reducer)
    check_state(reducer)
    check_dtypes(reducer)
    check_counted(reducer)
    for x in DEGENERATE.values():
        check_degenerate(reducer, x)
    for where, bad in zip((0, 700, -1), NONFINITE.values(), strict=True):
        check_nonfinite(reducer, bad, where)
    check_large(reducer)
