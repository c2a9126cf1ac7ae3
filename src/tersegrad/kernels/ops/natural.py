"""Exponents and signs, 9 bits per element."""

from torch import Tensor

from tersegrad.kernels.ops.bits import packed_nbytes

__all__ = ["TOP_EXPONENT", "check_natural", "natural_nbytes"]

TOP_EXPONENT = 254  # the largest exponent field that is finite


def natural_nbytes(n: int) -> int:
    """Number of bytes of ``n`` elements: exponents, then signs.

    >>> natural_nbytes(8), natural_nbytes(9)
    (9, 11)
    """
    return n + packed_nbytes(n, 1)


def check_natural(n: int, data: Tensor) -> None:
    """Raise ValueError unless ``data`` has exactly as many bytes as ``n`` elements take."""
    if data.numel() != natural_nbytes(n):
        raise ValueError(f"{n} elements take {natural_nbytes(n)} bytes, not {data.numel()}")
