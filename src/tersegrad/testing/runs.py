"""A reducer on N workers for some steps, as the engine would drive it, and what every worker saw."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tersegrad.comm import threads
from tersegrad.core import Comm, Finish, Layout, Reducer, State, Step, contribution
from tersegrad.core import state as states
from tersegrad.testing.inputs import LAYOUT, Gradient, learning_rate, squares


@dataclass
class Trace:
    """What one worker saw: the gradient, the mean and the rest of every step, and the state at the end."""

    gradients: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)  # what each gradient adds to the account (``contribution``)
    means: list[Tensor] = field(default_factory=list)
    rests: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # residual after each step
    state: State = field(default_factory=dict)


def run(
    reducer: Reducer,
    size: int,
    gradient: Gradient,
    layout: Layout = LAYOUT,
    steps: int = 3,
    first: int = 0,
    states_before: list[State] | None = None,
    in_place: bool = False,
    between: Callable[[State], None] = lambda state: None,
) -> list[Trace]:
    """``steps`` steps on ``size`` workers; one trace per worker."""

    def work(comm: Comm) -> Trace:
        trace = Trace(state=reducer.init(layout, comm))
        if states_before is not None:
            states.merge(states.split(states_before[comm.rank], layout), trace.state, layout)
        for number in range(first, first + steps):
            x = gradient(comm.rank, number)
            step = Step(layout, number, learning_rate(number), squares(x))
            trace.gradients.append(x.clone())
            trace.inputs.append(contribution(reducer, layout, trace.state, x.clone(), comm.size))
            out = x if in_place else torch.full_like(x, 123.0)
            before = states.copy(trace.state)
            finish(reducer.start(step, x, out, trace.state, comm), out)
            assert same(before, states.copy(trace.state)), (
                "a step changed the state itself; changes are staged with stage()"
            )
            (states.commit if bool(out.isfinite().all()) else states.roll_back)(trace.state)
            trace.means.append(out.clone())
            trace.rests.append(x.clone())
            trace.held.append(held(reducer, trace.state, layout))
            between(trace.state)
        return trace

    return threads.run(size, work)


def finish(rest: Finish, out: Tensor) -> None:
    """The second part of a reduction; if it says whether the mean is finite, that is so."""
    said = rest()
    assert said is None or said == bool(out.isfinite().all()), f"whether the mean is finite was said to be {said}"


def held(reducer: Reducer, state: State, layout: Layout) -> Tensor:
    """The residual, which ``clear`` must empty. The state stays as it is."""
    residual = reducer.residual(layout, state)
    seen = torch.zeros(layout.numel) if residual is None else residual.clone()
    reducer.clear(layout, state)
    emptied = _as_committed(state)
    left = reducer.residual(layout, emptied)
    assert left is None or not bool(left.any()), "clear() leaves a residual behind"
    states.roll_back(state)
    return seen


def _as_committed(state: State) -> State:
    """A copy of the state as it would be if the step were committed."""
    copied = {key: _as_committed(value) if isinstance(value, dict) else value for key, value in state.items()}
    committed = states.staged(copied)
    return {key: value for key, value in committed.items() if not key.startswith("_")}


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


def largest(traces: list[Trace], step: int | None = None) -> float:
    """The largest magnitude of any gradient, input, residual or mean that is finite; of one step, or of all."""
    chosen = slice(None) if step is None else slice(step, step + 1)
    lists = [seen for t in traces for seen in (t.gradients, t.inputs, t.means, t.held)]
    finite = [x.nan_to_num(0.0, 0.0, 0.0).abs() for seen in lists for x in seen[chosen]]
    return max((float(x.max()) for x in finite if x.numel()), default=0.0)


def assert_close(got: Tensor, want: Tensor, atol: float, what: str) -> None:
    """Raises AssertionError with the worst difference."""
    worst = float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
    assert worst <= atol, f"{what}: off by {worst:.3g}, allowed {atol:.3g}"
