"""Warmup: another reducer for the first steps of training, usually an uncompressed one."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.core import (
    Comm,
    Finish,
    Layout,
    Reducer,
    State,
    Step,
    Vector,
    Wrapper,
    contribution,
    param,
    phases,
    remembers,
    require,
    stage,
)
from tersegrad.reducers.dense import Dense


@dataclass(frozen=True, repr=False)
class Warmup(Wrapper):
    """Uses ``first`` for the first ``steps`` steps, then ``inner``: early gradients change fast, and delay hurts.

    Steps that are rolled back (NaN) do not count. For a ratio that shrinks step by step see Schedule.
    """

    examples: ClassVar[tuple[str, ...]] = ("Warmup(ErrorFeedback(AllGather(TopK(0.1))), steps=2)",)

    inner: Reducer = param(doc="reducer for the rest of training")
    steps: int = param(100, "length of the warm-up; higher => safer, more bytes")
    first: Reducer = param(doc="reducer for the first steps", factory=Dense)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "first", Reducer, "Write e.g. first=AllReduce(BF16()).")
        if type(self.steps) is not int or self.steps < 0:
            raise ValueError(f"Warmup(steps={self.steps!r}): a whole number of steps, 0 or more.")
        if remembers(self.first):
            raise ValueError(
                f"Warmup(first={self.first!r}): its residual at the end of the warm-up would be lost. "
                "Write one without a memory, e.g. first=AllReduce(BF16())."
            )

    def loses(self, workers: int) -> float:
        """The larger loss of the two."""
        return max(self.inner.loses(workers), self.first.loses(workers))

    def init(self, layout: Layout, comm: Comm) -> State:
        """The states of both, and the number of steps so far."""
        return {"position": 0, "first": self.first.init(layout, comm), **super().init(layout, comm)}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """``first`` during the warm-up, ``inner`` after it."""
        if state["position"] >= self.steps:
            return super().start(step, x, out, state, comm)
        stage(state, position=state["position"] + 1)
        return self.first.start(step, x, out, state["first"], comm)

    def active(self, state: State | None, number: int) -> Reducer:
        """``inner``, once the warm-up is over; until then this counts steps."""
        position = number if state is None else state["position"]
        return self if position < self.steps else self.inner.active(state and state["inner"], number)


@contribution.register
def _contribution(reducer: Warmup, layout: Layout, state: State, x: Tensor, workers: int) -> Tensor:
    if state["position"] < reducer.steps:
        return contribution(reducer.first, layout, state["first"], x, workers)
    return contribution(reducer.inner, layout, state["inner"], x, workers)


@phases.register
def _phases(reducer: Warmup) -> list[Reducer]:
    return [*phases(reducer.first), *phases(reducer.inner)]
