"""Every: accumulate gradients and send every n-th step only."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Comm, Finish, Layout, Memory, Reducer, State, Step, Sum, Vector, param, stage


@dataclass(frozen=True, repr=False)
class Every(Memory):
    """Accumulates gradients in the residual; ``inner`` sends in every n-th step, and the mean of other steps is 0.

    The unsent part stays in the residual, so this is error feedback too. A silent step still sends one number, which
    tells all workers of a NaN on any of them. If the optimizer has momentum, skip its step in silent steps yourself.
    """

    examples: ClassVar[tuple[str, ...]] = ("Every(AllGather(TopK(0.1)), n=2)", "Every(Dense(), n=3)")

    inner: Reducer = param(doc="the reducer that sends")
    n: int = param(2, "higher => fewer bytes, longer delay")

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.n) is not int or self.n < 1:
            raise ValueError(f"Every(n={self.n!r}): every n-th step is sent, n being 1 or more.")

    def init(self, layout: Layout, comm: Comm) -> State:
        return {"turn": 0, **super().init(layout, comm)}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Accumulate; in every n-th step, also send."""
        total, turn = self._total(step, x, state), (state["turn"] + 1) % self.n
        sends = turn == 0
        rest = self.inner.start(step, total, out, state["inner"], comm) if sends else _start_silent(total, out, comm)

        def finish() -> bool | None:
            finite = rest()
            self._hold(step, total)
            stage(state, residual=total.total, turn=turn)
            if out is not total.b:
                total.b.zero_()  # all of it was sent or is in the residual
            return finite

        return finish

    def clear(self, layout: Layout, state: State) -> None:
        """Stage a zero residual, and restart the count of steps."""
        super().clear(layout, state)
        stage(state, turn=0)


def _start_silent(total: Sum, out: Tensor, comm: Comm) -> Finish:
    """Compute the total, and tell the other workers only whether it is finite."""
    (finite,) = kernels.read(kernels.on(total.total).all_finite(total.add()))
    nonfinite = torch.tensor([0.0 if finite else 1.0])
    pending = comm.start_all_reduce(nonfinite)

    def finish() -> bool:
        pending.wait()
        everywhere = float(nonfinite) == 0.0
        out.fill_(0.0 if everywhere else torch.nan)
        return everywhere

    return finish
