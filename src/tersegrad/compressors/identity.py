"""Identity: the vector itself, 32 bits an element."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core import Compressor, Payload, State


@dataclass(frozen=True, repr=False)
class Identity(Compressor):
    """The vector itself, in float32; for comparison, and to test reducers with nothing lost."""

    summable: ClassVar[torch.dtype | None] = torch.float32

    def encode(self, x: Tensor, state: State) -> Payload:
        """A copy of the bytes."""
        payload = Payload.empty(4 * x.numel(), x.numel(), state, x.device)
        payload.body.view(torch.float32).copy_(x)
        return payload

    def add_decoded(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * x``."""
        acc.add_(body_as(payload, torch.float32), alpha=scale)


def body_as(payload: Payload, dtype: torch.dtype) -> Tensor:
    """The body as a vector of ``payload.numel`` elements, if it is exactly that long."""
    expected = payload.numel * dtype.itemsize
    if payload.body.numel() != expected:
        raise ValueError(
            f"a body of {payload.numel} {dtype} values has {expected} bytes, and {payload.body.numel()} bytes came."
        )
    if payload.body.storage_offset() % dtype.itemsize:
        return payload.body.clone().view(dtype)  # bytes cut out of a longer message may lie at any address
    return payload.body.view(dtype)
