"""One layer in one step: its phase, its slices, and when a phase ends."""

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from tersegrad.core import State, scratch
from tersegrad.reducers.gradiveq.slices import Slicing
from tersegrad.reducers.gradiveq.subspace import Subspace

WARM_UP, LEARN, COMPRESS, REFUSED = "warm-up", "learn", "compress", "refused"


@dataclass
class Layer:
    """One layer in one step."""

    place: int  # index in the bucket
    slicing: Slicing
    memory: State
    phase: str
    x: Tensor
    out: Tensor
    loss: dict[str, float] = field(default_factory=dict)  # measured in this step

    @cached_property
    def subspace(self) -> Subspace:
        """The basis and the mean of a compressed layer."""
        return Subspace(**self.memory["fit"])

    def split(self, x: Tensor, state: State) -> Tensor:
        """The slices of ``x``, in scratch shared by all layers."""
        return self.slicing.split(x, scratch(state, "slices", x.numel(), x.dtype, x.device))

    def join(self, c: Tensor, x: Tensor, state: State, subtract: bool = False) -> None:
        """``x = U c + mu``, or ``x -= U c + mu``."""
        slices = scratch(state, "slices", x.numel(), x.dtype, x.device)
        self.subspace.decode(c, slices)
        self.slicing.join(slices, self.subspace.mean, x, subtract)


def drifted(loss: dict[str, float], factor: float, target: float) -> bool:
    """Whether the odds of the loss, loss / (1 - loss), have grown by more than ``factor`` since the first measurement.

    A loss below the target counts as the target. Odds distinguish 2 % from 6 % as well as 92 % from 97 %: on a single
    worker, much of a gradient is noise outside any basis.
    """
    if not loss:
        return False

    def odds(share: float) -> float:
        share = min(max(share, target, 1e-6), 1 - 1e-6)
        return share / (1 - share)

    return odds(loss["recent"]) > factor * odds(loss["first"])
