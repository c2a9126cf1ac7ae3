"""ErrorFeedback: the part of a gradient that is not sent is added to the next gradient.

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD",
ICML 2019.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.core import (
    Comm,
    Finish,
    Layout,
    Memory,
    Reducer,
    State,
    Step,
    Vector,
    added,
    contribution,
    param,
    stage,
)
from tersegrad.wrappers import _clip


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Memory):
    """Adds what ``inner`` did not send (the residual) to the next gradient: nothing is lost, only delayed.

    total = residual + gradient;  out, residual = inner(total)

    The sum of all means plus the mean residual is the sum of all mean gradients.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "ErrorFeedback(AllGather(TopK(0.1)))",
        "ErrorFeedback(AllReduce(BF16()))",
        "ErrorFeedback(AllGather(TopK(0.1)), clip=2.0)",
    )

    inner: Reducer = param(doc="the reducer that sends")
    clip: float | None = param(None, _clip.DOC)

    def __post_init__(self) -> None:
        super().__post_init__()
        _clip.require_clip(self, self.clip)

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """The part of the total that ``inner`` does not send becomes the next residual."""
        if self.clip is not None:
            x = added(x)
            _clip.clip_tensors(x, step.layout, self.clip, comm.size)
        total = self._total(step, x, state)
        finish_inner = self.inner.start(step, total, out, state["inner"], comm)

        def finish() -> bool | None:
            finite = finish_inner()
            self._hold(step, total)
            stage(state, residual=total.total)
            if out is not total.b:
                total.b.zero_()  # all of it was sent or is in the residual
            return finite

        return finish


@contribution.register
def _contribution(reducer: ErrorFeedback, layout: Layout, state: State, x: Tensor, workers: int) -> Tensor:
    """The gradient, clipped."""
    if reducer.clip is not None:
        x = x.clone()
        _clip.clip_tensors(x, layout, reducer.clip, workers)
    return contribution(reducer.inner, layout, state["inner"], x, workers)
