"""Strom: where the gradient exceeds a threshold, its sign; one threshold for all of training.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.coded import Coded
from tersegrad.compressors.sparse import Sparse
from tersegrad.core import Compressor, Spec, State, reserve


@dataclass(frozen=True, repr=False)
class _Signs(Coded):
    """decode = +-tau, by the sign; 1 bit. Zero becomes +tau."""

    bits: ClassVar[int] = 1
    group_nbytes: ClassVar[int] = 0

    tau: float  # the magnitude that every value becomes

    def __post_init__(self) -> None:
        require_threshold(self, self.tau)

    def to_codes(self, values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """1 for what is below zero."""
        return values.lt(0).to(torch.uint8), torch.empty(0, dtype=torch.uint8, device=values.device)

    def from_codes(self, codes: Tensor, groups: Tensor, numbers: Tensor) -> Tensor:
        """+-tau."""
        return codes.to(torch.float32).mul_(-2.0 * self.tau).add_(self.tau)


@dataclass(frozen=True, repr=False)
class Strom(Sparse):
    """Sends sign(x) * tau wherever |x| > tau, at most once an element and step; with error feedback the rest stays.

    The bytes of a step are whatever passes: tau is in the units of the gradient and must be found by trying.
    """

    examples: ClassVar[tuple[str, ...]] = ("Strom(0.5)", "Strom(2.0)")

    tau: float  # higher => fewer elements, later

    def __post_init__(self) -> None:
        require_threshold(self, self.tau)

    @property
    def values(self) -> Compressor:  # type: ignore[override]
        """The sign alone."""
        return _Signs(self.tau)

    def select(self, x: Tensor, state: State) -> Tensor | None:
        """All that exceed tau."""
        kernel = kernels.on(x)
        room = reserve(state, "chosen", x.numel() // 16, torch.int32, x.device)
        count = kernel.above(x, self.tau, room)
        if count > room.numel():  # more than ever before
            room = reserve(state, "chosen", count, torch.int32, x.device)
            kernel.above(x, self.tau, room)
        return room[:count]


def require_threshold(spec: Spec, tau: object) -> None:
    """Refuses a threshold that is not a positive number."""
    if isinstance(tau, bool) or not isinstance(tau, int | float) or not 0 < tau < math.inf:
        raise ValueError(
            f"{type(spec).__name__}(tau={tau!r}): a threshold is a positive number in the units of the gradient, "
            "e.g. tau=0.01."
        )
