"""StepAhead: evaluate gradients at the weights that applying the residual would lead to.

Xu, Huo, Huang, "Step-ahead error feedback for distributed training with compressed gradient", AAAI 2021.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from tersegrad.core import Needs, Reducer, Wrapper, param, phases, remembers


@dataclass(frozen=True, repr=False)
class StepAhead(Wrapper):
    """Forward and backward run at w - by * (learning rate) * residual; the host shifts the weights.

    ``inner`` reduces those gradients as usual, and w is restored before the optimizer's step. Without the shift every
    new gradient repeats the same correction until the residual is sent, so that the update overshoots when it finally
    arrives. For ``torch.optim.SGD`` only, whose step is (learning rate) * gradient.
    """

    examples: ClassVar[tuple[str, ...]] = ("StepAhead(ErrorFeedback(AllGather(TopK(0.1))))",)

    inner: Reducer = param(doc="the reducer that sends, with a residual")
    by: float = param(1.0, "shift in learning rates; 0: no shift, higher => weights differ more between workers")

    def __post_init__(self) -> None:
        super().__post_init__()
        by = self.by
        if isinstance(by, bool) or not isinstance(by, int | float) or not 0 <= by < math.inf:
            raise ValueError(f"StepAhead(by={by!r}): learning rates to step ahead, 0 or more. The paper has 1.")
        if any(isinstance(part, StepAhead) for part in self.inner.walk()):
            raise ValueError(f"StepAhead({self.inner!r}): twice ahead. Write StepAhead(..., by=2.0) around the rest.")
        if not remembers(self.inner):
            raise ValueError(
                f"StepAhead({self.inner!r}): nothing in it keeps a residual, so there is nothing to step "
                f"ahead by. Write StepAhead(ErrorFeedback({self.inner!r}))."
            )

    def needs(self) -> Needs:
        """Shifted weights, and the learning rate that scales the shift."""
        return Needs(lr=True, lookahead=self.by)


@phases.register
def _phases(reducer: StepAhead) -> list[Reducer]:
    return phases(reducer.inner)
