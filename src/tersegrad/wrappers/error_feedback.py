"""ErrorFeedback: what is not sent now is added to the next gradient.

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD",
ICML 2019.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core import Bucket, Comm, Finish, Reducer, State, later, require, spare
from tersegrad.wrappers.memory import refuse_memory


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Reducer):
    """Remembers what ``inner`` did not send and adds it to the next gradient, so that nothing is lost, only late.

    total = residual + gradient;  out, residual = inner(total)

    The sum of all means plus the mean residual is the sum of all mean gradients.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "ErrorFeedback(AllGather(TopK(0.1)))",
        "ErrorFeedback(AllReduce(BF16()))",
    )
    remembers: ClassVar[bool] = True

    inner: Reducer  # what sends

    def __post_init__(self) -> None:
        require(self, "inner", Reducer, f"Write ErrorFeedback(AllGather({self.inner!r})).")
        refuse_memory(self, self.inner)

    @property
    def conserves(self) -> bool:
        """As ``inner``."""
        return self.inner.conserves

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Nothing is late yet."""
        return {"residual": torch.zeros(bucket.numel), "inner": self.inner.init(bucket, comm)}

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """What ``inner`` leaves of the total is the next residual."""
        self.start(bucket, x, out, state, comm)()

    def start(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> Finish:
        """As far as ``inner`` gets without the others."""
        total = spare(state, "residual")
        finish_inner = self.inner.start_sum(bucket, state["residual"], x, total, out, state["inner"], comm)

        def finish() -> bool | None:
            finite = finish_inner()
            later(state, residual=total)
            if out is not x:
                x.zero_()  # all of it is sent or remembered
            return finite

        return finish

    def waiting(self, bucket: Bucket, state: State) -> Tensor | None:
        """The residual."""
        residual: Tensor = state["residual"]
        return residual

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """The residual goes out."""
        out.add_(state["residual"])
        later(state, residual=spare(state, "residual").zero_())
        self.inner.flush(bucket, out, state["inner"])
