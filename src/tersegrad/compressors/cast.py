"""FP16 and BF16: 16 bits per element. Finite values stay finite: those out of range are saturated."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.compressors.identity import body_as
from tersegrad.core import Payload, State, Summable, Traits, scratch

_BLOCK = 1 << 16  # elements converted at a time: they stay in cache, and no full-size temporary is made


class Cast(Summable):
    """x rounded to nearest in a narrower float, clamped to +-limit; NaN and infinity stay non-finite."""

    @property
    @abstractmethod
    def limit(self) -> float:
        """The largest magnitude that is sent."""

    def encode(self, x: Tensor, state: State) -> Payload:
        payload = Payload.empty(self.dtype.itemsize * x.numel(), x.numel(), state, x.device)
        block = scratch(state, "block", min(_BLOCK, x.numel()), torch.float32, x.device)
        for wide, narrow in zip(x.split(_BLOCK), payload.body.view(self.dtype).split(_BLOCK), strict=True):
            clamped = torch.clamp(wide, -self.limit, self.limit, out=block[: wide.numel()])
            clamped.add_(wide, alpha=0.0)  # Inf * 0 is NaN: clamping alone would turn an infinity into a finite number
            narrow.copy_(clamped)
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        block = torch.empty(min(_BLOCK, acc.numel()), dtype=torch.float32, device=acc.device)
        for narrow, part in zip(body_as(payload, self.dtype).split(_BLOCK), acc.split(_BLOCK), strict=True):
            part.add_(block[: part.numel()].copy_(narrow), alpha=scale)


@dataclass(frozen=True, repr=False)
class FP16(Cast):
    """Half precision: 11 significant bits, magnitudes from 6e-8 to 6e4."""

    dtype: ClassVar[torch.dtype] = torch.float16

    @property
    def limit(self) -> float:
        """Below the largest float16 (65504), so that a mean of saturated values, rounded, is still finite."""
        return 61440.0


@dataclass(frozen=True, repr=False)
class BF16(Cast):
    """bfloat16: 8 significant bits, the range of float32."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    @property
    def limit(self) -> float:
        """Two steps below the largest bfloat16, so that a mean of saturated values, rounded, is still finite."""
        return 1.984375 * 2.0**127

    def traits(self) -> Traits:
        """The error is at most half a step of 8 significant bits, also for saturated values."""
        return Traits(error=2.0**-8)
