"""Constants and argument checks of XXH64."""

import torch
from torch import Tensor

__all__ = ["STRIPE", "XXH_PRIMES", "check_bytes"]

XXH_PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
STRIPE = 32  # bytes: one word for each of the four lanes


def check_bytes(data: Tensor, seed: int) -> None:
    """Raise TypeError unless ``data`` is a vector of bytes, ValueError unless the seed has 64 bits."""
    if data.dtype != torch.uint8 or data.dim() != 1:
        seen = f"{data.dtype} of shape {tuple(data.shape)}"
        raise TypeError(f"the checksum takes a 1-D torch.uint8 tensor, got {seen}: use .flatten().view(torch.uint8)")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"the seed must be in [0, 2**64), got {seed}")
