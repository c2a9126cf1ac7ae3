"""Identity: the vector itself, 32 bits per element."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core import Payload, State, Summable, Traits


@dataclass(frozen=True, repr=False)
class Identity(Summable):
    """The vector itself, in float32; for comparison, and to test reducers without loss."""

    dtype: ClassVar[torch.dtype] = torch.float32

    def encode(self, x: Tensor, state: State) -> Payload:
        payload = Payload.empty(4 * x.numel(), x.numel(), state, x.device)
        payload.body.view(torch.float32).copy_(x)
        return payload

    def traits(self) -> Traits:
        return Traits(error=0.0)

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        acc.add_(body_as(payload, torch.float32), alpha=scale)


def body_as(payload: Payload, dtype: torch.dtype) -> Tensor:
    """The body as a vector of ``payload.numel`` elements, if it is exactly that long."""
    expected = payload.numel * dtype.itemsize
    if payload.body.numel() != expected:
        raise ValueError(f"a body of {payload.numel} {dtype} values has {expected} bytes, got {payload.body.numel()}.")
    return aligned(payload.body, dtype)


def aligned(body: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes viewed as numbers; a copy if they are not aligned for this dtype."""
    return (body.clone() if body.storage_offset() % dtype.itemsize else body).view(dtype)
