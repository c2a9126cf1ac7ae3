"""The layout of floats of N bits with an offset (``kernels.reference.range_float`` defines the codes)."""

from typing import NamedTuple

from torch import Tensor

from tersegrad.kernels.ops.bits import packed_nbytes
from tersegrad.kernels.ops.floats import INF_BITS, MANTISSA_BITS, bits_of, float_of

__all__ = ["Layout", "check_range"]


class Layout(NamedTuple):
    """Which number each code of ``bits`` bits stands for."""

    bits: int  # of a code, 2 to 16
    mantissa: int  # bits that follow the leading one: a magnitude's steps are 2^-mantissa of its power of two
    base: int  # the float32 pattern of eps, shifted right by ``shift``
    positives: int  # how many codes stand for positive numbers
    negatives: int  # how many codes stand for negative numbers

    @property
    def shift(self) -> int:
        """How many low bits of a float32 pattern are dropped."""
        return MANTISSA_BITS - self.mantissa

    @property
    def eps(self) -> float:
        """The smallest positive magnitude, even if the layout has no positive codes."""
        return float_of(self.base << self.shift)

    @property
    def high(self) -> float:
        """The largest number."""
        return float_of(self.base + self.positives - 1 << self.shift) if self.positives else 0.0

    @property
    def low(self) -> float:
        """The smallest number: the most negative one, or zero."""
        return -float_of(self.base + self.negatives - 1 << self.shift) if self.negatives else 0.0

    def first(self, nearest: bool) -> int:
        """The smallest float32 pattern that is not coded as zero: that of eps, or of eps / 2 if rounding to nearest."""
        return bits_of(self.eps / 2 if nearest else self.eps)

    def half(self, nearest: bool) -> int:
        """Added to a pattern before its low bits are dropped: half a step if rounding to nearest, otherwise 0."""
        return 1 << self.shift - 1 if nearest else 0

    def check(self) -> "Layout":
        """Raise ValueError unless every code stands for a finite number."""
        ok = 2 <= self.bits <= 16 and 0 <= self.mantissa < self.bits and 1 <= self.base <= INF_BITS
        counts = self.positives, self.negatives
        ok = ok and min(counts) >= 0 and sum(counts) < 1 << self.bits
        if not ok or self.base + max(*counts, 1) - 1 > INF_BITS - 1 >> self.shift:
            raise ValueError(f"{self} is not a range of float32 numbers.")
        return self


def check_range(count: int, layout: Layout, data: Tensor) -> None:
    """Raise ValueError unless the layout is valid and ``data`` has exactly as many bytes as ``count`` codes take."""
    layout.check()
    nbytes = packed_nbytes(count, layout.bits)
    if data.numel() != nbytes:
        raise ValueError(f"{count} codes of {layout.bits} bits take {nbytes} bytes, not {data.numel()}")
