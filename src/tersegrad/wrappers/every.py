"""Every: gradients are added up and sent every n-th step only."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Comm, Finish, Layout, Memory, Reducer, State, Step, Sum, Vector, param, stage


@dataclass(frozen=True, repr=False)
class Every(Memory):
    """total = residual + gradient; in every n-th step ``inner`` sends of the total what it sends, else the mean is 0.

    What is not sent stays in the residual, so this is error feedback too. A silent step still sends one number, by
    which all workers learn of a NaN on any of them. Where the optimizer has momentum, skip its silent steps yourself.
    """

    examples: ClassVar[tuple[str, ...]] = ("Every(AllGather(TopK(0.1)), n=2)", "Every(Dense(), n=3)")

    inner: Reducer = param(doc="what sends")
    n: int = param(2, "higher => fewer bytes, later")

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.n) is not int or self.n < 1:
            raise ValueError(f"Every(n={self.n!r}): every n-th step is sent, n being 1 or more.")

    def init(self, layout: Layout, comm: Comm) -> State:
        """No residual yet, and no turn taken."""
        return {"turn": 0, **super().init(layout, comm)}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Adds up; sends when it is time."""
        total, turn = self._total(x, state), (state["turn"] + 1) % self.n
        sends = turn == 0
        rest = self.inner.start(step, total, out, state["inner"], comm) if sends else _start_silent(total, out, comm)

        def finish() -> bool | None:
            finite = rest()
            stage(state, residual=total.total, turn=turn)
            if out is not total.b:
                total.b.zero_()  # all of it is sent or remembered
            return finite

        return finish

    def clear(self, layout: Layout, state: State) -> None:
        """Counting begins anew, too."""
        super().clear(layout, state)
        stage(state, turn=0)


def _start_silent(total: Sum, out: Tensor, comm: Comm) -> Finish:
    """Makes the total, and tells the others only whether it is finite."""
    (finite,) = kernels.read(kernels.on(total.total).all_finite(total.add()))
    nonfinite = torch.tensor([0.0 if finite else 1.0])
    pending = comm.start_all_reduce(nonfinite)

    def finish() -> bool:
        pending.wait()
        everywhere = float(nonfinite) == 0.0
        out.fill_(0.0 if everywhere else torch.nan)
        return everywhere

    return finish
