"""Ternary digits, five to a byte (``kernels.reference.ternary`` defines their order)."""

from torch import Tensor

__all__ = [
    "TERNARY_BYTES",
    "TERNARY_DIGITS",
    "TERNARY_MAX_BYTE",
    "check_ternary",
    "ternary_nbytes",
    "ternary_refusal",
]

TERNARY_DIGITS = 5  # per byte
TERNARY_BYTES = 256  # per block
TERNARY_MAX_BYTE = 3**TERNARY_DIGITS - 1


def ternary_nbytes(n: int) -> int:
    """Number of bytes of ``n`` digits.

    >>> ternary_nbytes(5), ternary_nbytes(6), ternary_nbytes(0)
    (1, 2, 0)
    """
    return -(-n // TERNARY_DIGITS)


def ternary_refusal(byte: int) -> ValueError:
    """The error for a byte that does not stand for five digits."""
    return ValueError(f"five ternary digits make a byte of 0 to {TERNARY_MAX_BYTE}, got {byte}")


def check_ternary(n: int, data: Tensor) -> None:
    """Raise ValueError unless ``data`` has exactly as many bytes as ``n`` digits take."""
    if data.numel() != ternary_nbytes(n):
        raise ValueError(f"{n} ternary digits take {ternary_nbytes(n)} bytes, not {data.numel()}")
