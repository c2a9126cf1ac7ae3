"""Levels of stochastic rounding, with one scale for every ``bucket`` elements."""

from torch import Tensor

from tersegrad.kernels.ops.bits import packed_nbytes

__all__ = [
    "MIN_SCALE",
    "NORMS",
    "QSGD_MAX_SCALE",
    "bucket_count",
    "check_buckets",
    "check_level_codes",
    "check_levels",
    "check_norm",
    "check_quantise",
    "levels_of",
]

MIN_SCALE = 2.0**-100  # a smaller scale counts as zero: its step would be denormal, or nearly so
QSGD_MAX_SCALE = 2.0**128 - 2.0**122  # so that rounding never overflows to infinity
NORMS = ("max", "l2")


def bucket_count(n: int, bucket: int) -> int:
    """Number of buckets, and so of scales, of a vector of ``n`` elements; the last bucket may be shorter.

    >>> bucket_count(1024, 512), bucket_count(1025, 512), bucket_count(0, 512)
    (2, 3, 0)
    """
    return -(-n // bucket)


def levels_of(bits: int) -> int:
    """Number of levels on each side of zero that a code of ``bits`` bits can hold.

    >>> levels_of(2), levels_of(4), levels_of(8)
    (1, 7, 127)
    """
    return (1 << bits - 1) - 1


def check_buckets(n: int, bucket: int, scales: Tensor) -> None:
    """Raise ValueError unless there is one scale for each bucket."""
    if bucket < 1 or scales.numel() != bucket_count(n, bucket):
        raise ValueError(f"{n} elements in buckets of {bucket} do not have {scales.numel()} scales")


def check_levels(levels: int) -> None:
    """Raise ValueError unless a code of at most 16 bits can hold the levels."""
    if not 1 <= levels <= levels_of(16):
        raise ValueError(f"there can be 1 to {levels_of(16)} levels, not {levels}")


def check_norm(norm: str) -> None:
    """Raise ValueError unless the norm is known."""
    if norm not in NORMS:
        raise ValueError(f"the norms are {NORMS}, not {norm!r}")


def check_level_codes(n: int, bits: int, data: Tensor) -> None:
    """Raise ValueError unless ``data`` has exactly as many bytes as the codes take, and a code can hold a level."""
    check_levels(levels_of(bits) if bits > 0 else 0)
    if data.numel() != packed_nbytes(n, bits):
        raise ValueError(f"{n} codes of {bits} bits take {packed_nbytes(n, bits)} bytes, not {data.numel()}")


def check_quantise(x: Tensor, scales: Tensor, bucket: int, levels: int, out: Tensor) -> None:
    """Raise ValueError unless there is one scale per bucket, and ``out`` has one element per level."""
    check_buckets(x.numel(), bucket, scales)
    check_levels(levels)
    if out.numel() != x.numel():
        raise ValueError(f"{x.numel()} elements have {x.numel()} levels, and out has a capacity of {out.numel()}")
