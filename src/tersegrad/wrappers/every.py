"""Every: gradients are added up and sent every n-th step only."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Bucket, Comm, Reducer, State, later, require, spare
from tersegrad.wrappers.memory import refuse_memory, with_residual


@dataclass(frozen=True, repr=False)
class Every(Reducer):
    """total = residual + gradient; in every n-th step ``inner`` sends of the total what it sends, else the mean is 0.

    What is not sent stays in the residual, so this is error feedback too. A silent step still sends one number, by
    which all workers learn of a NaN on any of them. Where the optimizer has momentum, skip its silent steps yourself.
    """

    examples: ClassVar[tuple[str, ...]] = ("Every(AllGather(TopK(0.1)), n=2)", "Every(Dense(), n=3)")
    remembers: ClassVar[bool] = True

    inner: Reducer  # what sends
    n: int = 2  # higher => fewer bytes, later

    def __post_init__(self) -> None:
        require(self, "inner", Reducer, f"Write Every(AllGather({self.inner!r}), n=2).")
        if type(self.n) is not int or self.n < 1:
            raise ValueError(f"Every(n={self.n!r}): every n-th step is sent, n being 1 or more.")
        refuse_memory(self, self.inner)

    @property
    def conserves(self) -> bool:
        """As ``inner``."""
        return self.inner.conserves

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Nothing is late yet."""
        return {"turn": 0, "residual": torch.zeros(bucket.numel), "inner": self.inner.init(bucket, comm)}

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """Adds up; sends when it is time."""
        total = with_residual(x, state)
        turn = (state["turn"] + 1) % self.n
        if turn == 0:
            self.inner.reduce(bucket, total, out, state["inner"], comm)
        else:
            poisoned = torch.tensor([0.0 if kernels.on(total).all_finite(total) else 1.0])
            comm.all_reduce(poisoned)
            out.fill_(torch.nan if float(poisoned) else 0.0)
        later(state, residual=total, turn=turn)
        if out is not x:
            x.zero_()  # all of it is sent or remembered

    def waiting(self, bucket: Bucket, state: State) -> Tensor | None:
        """The residual."""
        residual: Tensor = state["residual"]
        return residual

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """The residual goes out."""
        out.add_(state["residual"])
        later(state, residual=spare(state, "residual").zero_(), turn=0)
        self.inner.flush(bucket, out, state["inner"])
