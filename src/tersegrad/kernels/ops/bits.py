"""Codes of 1 to 16 bits, packed into bytes."""

import torch
from torch import Tensor

__all__ = ["MAX_BITS", "check_packed", "packed_nbytes"]

MAX_BITS = 16  # per code


def packed_nbytes(count: int, bits: int) -> int:
    """Number of bytes of ``count`` packed codes of ``bits`` bits each.

    >>> packed_nbytes(5, 3), packed_nbytes(8, 10), packed_nbytes(0, 7)
    (2, 10, 0)
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"a code has 1 to {MAX_BITS} bits, not {bits}")
    return -(-count * bits // 8)


def check_packed(codes: Tensor, bits: int, data: Tensor) -> None:
    """Raise unless the dtype of ``codes`` can hold the codes and ``data`` has exactly as many bytes as they take."""
    nbytes = packed_nbytes(codes.numel(), bits)
    if codes.dtype != torch.int32 and (codes.dtype != torch.uint8 or bits > 8):
        allowed = "int32 or uint8" if bits <= 8 else "int32"
        raise TypeError(f"codes of {bits} bits are {allowed}, not {codes.dtype}")
    if data.numel() != nbytes:
        raise ValueError(f"{codes.numel()} codes of {bits} bits take {nbytes} bytes, not {data.numel()}")
