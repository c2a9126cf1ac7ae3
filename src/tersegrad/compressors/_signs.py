"""Every value as its sign times one magnitude, in 1 bit: the quantiser of Strom's method and of VGC's hybrid."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.compressors._fixed_width import FixedWidth
from tersegrad.core import Spec, param


@dataclass(frozen=True, repr=False)
class Signs(FixedWidth):
    """decode = +-tau, by the sign, in 1 bit. Zero becomes +tau."""

    bits: ClassVar[int] = 1
    group_nbytes: ClassVar[int] = 0

    tau: float = param(doc="the magnitude that every value becomes")

    def __post_init__(self) -> None:
        require_threshold(self, self.tau)

    def to_codes(self, values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        return values.lt(0).to(torch.uint8), torch.empty(0, dtype=torch.uint8, device=values.device)

    def from_codes(self, codes: Tensor, groups: Tensor, numbers: Tensor) -> Tensor:
        return codes.to(torch.float32).mul_(-2.0 * self.tau).add_(self.tau)


def require_threshold(spec: Spec, tau: object) -> None:
    """Raise ValueError unless the threshold is a positive number."""
    if isinstance(tau, bool) or not isinstance(tau, int | float) or not 0 < tau < math.inf:
        raise ValueError(
            f"{type(spec).__name__}(tau={tau!r}): a threshold is a positive number in the units of the gradient, "
            "e.g. tau=0.01."
        )
