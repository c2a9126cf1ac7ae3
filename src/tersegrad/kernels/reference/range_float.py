"""Floats of N bits with an offset instead of a sign and an exponent, in plain torch: the definition.

A magnitude is cut to m mantissa bits by shifting the bits of its float32 pattern: ``bits(x) >> (23 - m)`` grows by one
from each representable magnitude to the next. Codes count these steps from the smallest one, eps:

    0                                       zero
    1 .. positives                          eps and up
    positives + 1 .. positives + negatives  -eps and down
"""

from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from tersegrad.kernels.reference.bits import pack_bits, packed_nbytes, unpack_bits

ABS_MASK = 0x7FFFFFFF  # everything but the sign
INF_BITS = 0x7F800000  # |x| has these bits or more <=> x is infinite or NaN
MANTISSA_BITS = 23  # of float32

_FLOAT, _INT = Struct("<f"), Struct("<i")  # twenty times as fast as a tensor of one element


class Layout(NamedTuple):
    """Which number each code of ``bits`` bits stands for."""

    bits: int  # of a code, 2 to 16
    mantissa: int  # bits that follow the leading one: a magnitude's steps are 2^-mantissa of its power of two
    base: int  # the float32 pattern of eps, shifted
    positives: int  # how many codes stand for positive numbers
    negatives: int  # and for negative ones

    @property
    def shift(self) -> int:
        """How many bits of a float32 pattern are cut off."""
        return MANTISSA_BITS - self.mantissa

    @property
    def eps(self) -> float:
        """The smallest positive number, were there one."""
        return float_of(self.base << self.shift)

    @property
    def high(self) -> float:
        """The largest number."""
        return float_of(self.base + self.positives - 1 << self.shift) if self.positives else 0.0

    @property
    def low(self) -> float:
        """The smallest number."""
        return -float_of(self.base + self.negatives - 1 << self.shift) if self.negatives else 0.0

    def first(self, nearest: bool) -> int:
        """The smallest float32 pattern that is not sent as zero: of eps, or of eps / 2 where that is nearer to eps."""
        return bits_of(self.eps / 2 if nearest else self.eps)

    def half(self, nearest: bool) -> int:
        """What is added to a pattern before it is cut: half a step, or nothing."""
        return 1 << self.shift - 1 if nearest else 0

    def check(self) -> "Layout":
        """Raise ValueError unless every code stands for a finite number."""
        ok = 2 <= self.bits <= 16 and 0 <= self.mantissa < self.bits and 1 <= self.base <= INF_BITS
        counts = self.positives, self.negatives
        ok = ok and min(counts) >= 0 and sum(counts) < 1 << self.bits
        if not ok or self.base + max(*counts, 1) - 1 > INF_BITS - 1 >> self.shift:
            raise ValueError(f"{self} is no range of float32 numbers.")
        return self


def bits_of(value: float) -> int:
    """The pattern of a float32.

    >>> hex(bits_of(0.125))
    '0x3e000000'
    """
    return int(_INT.unpack(_FLOAT.pack(value))[0])


def float_of(bits: int) -> float:
    """The float32 that a pattern stands for."""
    return float(_FLOAT.unpack(_INT.pack(bits))[0])


def abs_max(x: Tensor) -> float:
    """The largest ``|x|``, 0 if there is none; infinite or NaN if and only if an element of ``x`` is."""
    return float_of(int((x.view(torch.int32) & ABS_MASK).max())) if x.numel() else 0.0


def range_encode(x: Tensor, layout: Layout, nearest: bool, out: Tensor) -> bool:
    """Write the packed codes of ``x`` to ``out``, which has exactly their bytes; False if an ``x`` is not finite.

    What is beyond the range becomes its end. Magnitudes are cut towards zero, and those below eps become zero; or,
    with ``nearest``, they become the nearer neighbour, the larger one of two equally near.
    """
    patterns = x.view(torch.int32)
    magnitudes = patterns & ABS_MASK
    if bool((magnitudes >= INF_BITS).any()):
        return False
    steps = (magnitudes + layout.half(nearest) >> layout.shift) - layout.base + 1
    most = torch.where(patterns < 0, layout.negatives, layout.positives)
    steps = steps.clamp(min=1).minimum(most)
    steps[magnitudes < layout.first(nearest)] = 0
    codes = torch.where((patterns < 0) & (steps > 0), steps + layout.positives, steps)
    pack_bits(codes.to(torch.int32), layout.bits, out)
    return True


def range_decode_add(data: Tensor, layout: Layout, acc: Tensor, scale: float) -> None:
    """``acc += scale * decoded(data)``, the product rounded to float32 before it is added.

    A code that stands for nothing is read as the last one that does, so any bytes decode to finite numbers.
    """
    codes = torch.empty(acc.numel(), dtype=torch.int32, device=acc.device)
    unpack_bits(data, layout.bits, codes)
    codes = codes.clamp(max=layout.positives + layout.negatives)
    negative = codes > layout.positives
    steps = torch.where(negative, codes - layout.positives, codes)
    values = (steps + (layout.base - 1) << layout.shift).to(torch.int32).view(torch.float32)
    values = torch.where(codes > 0, torch.where(negative, -values, values), 0.0)
    acc.add_(values * torch.tensor(scale, dtype=torch.float32))


def check_range(count: int, layout: Layout, data: Tensor) -> None:
    """Raise ValueError unless the layout is sound and ``data`` has exactly the bytes of ``count`` codes."""
    layout.check()
    nbytes = packed_nbytes(count, layout.bits)
    if data.numel() != nbytes:
        raise ValueError(f"{count} codes of {layout.bits} bits take {nbytes} bytes, not {data.numel()}")
