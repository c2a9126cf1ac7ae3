"""A reducer on N workers for some steps, as the hook would drive it, and what every worker saw."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tersegrad import local
from tersegrad import state as states
from tersegrad.core import Bucket, Comm, Finish, Reducer, State
from tersegrad.testing.inputs import BUCKET, Gradient, learning_rate, squares


@dataclass
class Trace:
    """What one worker saw: the gradient, the mean and the rest of every step, and the state at the end."""

    gradients: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    rests: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # memory after each step
    state: State = field(default_factory=dict)


def run(
    reducer: Reducer,
    size: int,
    gradient: Gradient,
    bucket: Bucket = BUCKET,
    steps: int = 3,
    first: int = 0,
    states_before: list[State] | None = None,
    in_place: bool = False,
    between: Callable[[State], None] = lambda state: None,
) -> list[Trace]:
    """``steps`` steps on ``size`` workers; one trace per worker."""

    def work(comm: Comm) -> Trace:
        mine = Bucket(bucket.names, bucket.shapes, seed=bucket.seed)  # buckets are the hook's own: one per worker
        trace = Trace(state=reducer.init(mine, comm))
        if states_before is not None:
            states.paste(states.cut(states_before[comm.rank], mine), trace.state, mine)
        for step in range(first, first + steps):
            mine.step = step
            x = gradient(comm.rank, step)
            mine.squares, mine.lr = squares(x), learning_rate(step)
            trace.gradients.append(x.clone())
            out = x if in_place else torch.full_like(x, 123.0)
            before = states.copy(trace.state)
            finish(reducer.start(mine, x, out, trace.state, comm), out)
            assert same(before, states.copy(trace.state)), (
                "reduce changed the state itself; changes are noted with later()"
            )
            states.settle(trace.state, keep=bool(out.isfinite().all()))
            trace.means.append(out.clone())
            trace.rests.append(x.clone())
            trace.held.append(held(reducer, trace.state, mine))
            between(trace.state)
        return trace

    return local.run(size, work)


def finish(rest: Finish, out: Tensor) -> None:
    """The second part of a reduce; if it says whether the mean is finite, that is so."""
    said = rest()
    assert said is None or said == bool(out.isfinite().all()), f"whether the mean is finite was said to be {said}"


def held(reducer: Reducer, state: State, bucket: Bucket) -> Tensor:
    """The part of past gradients that a reducer still remembers: what a flush would send. The state stays as it is."""
    waits = reducer.waiting(bucket, state)
    seen = torch.zeros(bucket.numel) if waits is None else waits.clone()
    remembered = torch.zeros(bucket.numel)
    reducer.flush(bucket, remembered, state)
    states.settle(state, keep=False)
    assert torch.equal(seen, remembered), "waiting() shows something else than flush() sends"
    return remembered


def same(a: object, b: object) -> bool:
    """Whether two states hold the same."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a == b


def mean(tensors: list[Tensor]) -> Tensor:
    """Over workers, in double precision."""
    return torch.stack(tensors).double().mean(0)


def largest(traces: list[Trace]) -> float:
    """The largest magnitude of any gradient or mean that is finite."""
    seen = [x[x.isfinite()] for t in traces for x in (*t.gradients, *t.means)]
    return max((float(x.abs().max()) for x in seen if x.numel()), default=0.0)


def assert_close(got: Tensor, want: Tensor, atol: float, what: str) -> None:
    """Raises AssertionError with the worst difference."""
    worst = float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
    assert worst <= atol, f"{what}: off by {worst:.3g}, allowed {atol:.3g}"
