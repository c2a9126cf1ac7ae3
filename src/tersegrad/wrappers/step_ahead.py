"""StepAhead: gradients are taken where the parameters would be if what waits had been applied.

Xu, Huo, Huang, "Step-ahead error feedback for distributed training with compressed gradient", AAAI 2021.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.core import Bucket, Comm, Finish, Reducer, State, require


@dataclass(frozen=True, repr=False)
class StepAhead(Reducer):
    """Forward and backward run at w - by * (learning rate) * (what this worker remembers and has not sent).

    What is sent, remembered and applied is what ``inner`` makes of those gradients; the optimizer gets w back as it
    was. A gradient that waits is then not taken a second time at a point that does not know of it, which is what makes
    late gradients costly at high learning rates. For ``torch.optim.SGD``, whose step is (learning rate) * gradient.
    """

    examples: ClassVar[tuple[str, ...]] = ("StepAhead(ErrorFeedback(AllGather(TopK(0.1))))",)
    remembers: ClassVar[bool] = True

    inner: Reducer  # what sends, and remembers what it has not sent
    by: float = 1.0  # learning rates to step ahead; 0: not at all, higher => workers drift further from one another

    def __post_init__(self) -> None:
        require(self, "inner", Reducer, "Write e.g. StepAhead(ErrorFeedback(AllGather(TopK(0.01)))).")
        by = self.by
        if isinstance(by, bool) or not isinstance(by, int | float) or not 0 <= by < math.inf:
            raise ValueError(f"StepAhead(by={by!r}): learning rates to step ahead, 0 or more. The paper has 1.")
        parts = [part for part in self.inner.walk() if isinstance(part, Reducer)]
        if any(isinstance(part, StepAhead) for part in parts):
            raise ValueError(f"StepAhead({self.inner!r}): twice ahead. Write StepAhead(..., by=2.0) around the rest.")
        if not any(part.remembers for part in parts):
            raise ValueError(
                f"StepAhead({self.inner!r}): nothing in it remembers what was not sent, so there is nothing to step "
                f"ahead by. Write StepAhead(ErrorFeedback({self.inner!r}))."
            )

    @property
    def ahead(self) -> float:  # type: ignore[override]
        """That is what it is for."""
        return self.by

    @property
    def follows_lr(self) -> bool:  # type: ignore[override]
        """A gradient moves parameters by that."""
        return True

    @property
    def conserves(self) -> bool:
        """As ``inner``."""
        return self.inner.conserves

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """``inner``'s."""
        return {"inner": self.inner.init(bucket, comm)}

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """By ``inner``: the step ahead was made before the gradients were."""
        self.start(bucket, x, out, state, comm)()

    def start(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> Finish:
        """As far as ``inner`` gets without the others."""
        return self.inner.start(bucket, x, out, state["inner"], comm)

    def waiting(self, bucket: Bucket, state: State) -> Tensor | None:
        """``inner``'s."""
        return self.inner.waiting(bucket, state["inner"])

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """``inner``'s."""
        self.inner.flush(bucket, out, state["inner"])
