"""Floats of N bits with an offset instead of a sign and an exponent, in plain torch: the definition.

A magnitude is truncated to m mantissa bits by shifting the bits of its float32 pattern: ``bits(x) >> (23 - m)`` grows
by one from each representable magnitude to the next. Codes count these steps from the smallest one, eps:

    0                                       zero
    1 .. positives                          eps and up
    positives + 1 .. positives + negatives  -eps and down
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import ABS_MASK, Answer, check_range
from tersegrad.kernels.ops import INF_BITS as INF_BITS
from tersegrad.kernels.ops import Layout as Layout
from tersegrad.kernels.ops import bits_of as bits_of
from tersegrad.kernels.ops import float_of as float_of
from tersegrad.kernels.reference.bits import pack_bits, unpack_bits
from tersegrad.kernels.reference.moments import abs_max as abs_max

__all__ = ["range_decode_add", "range_encode"]


def range_encode(x: Tensor, layout: Layout, nearest: bool, out: Tensor) -> Answer:
    """Write the packed codes of ``x`` to ``out``, which has exactly that many bytes; False if an ``x`` is non-finite.

    If it is, ``out`` is unspecified. Numbers outside the range are clamped to it. Magnitudes are truncated, and those
    below eps become zero; with ``nearest`` they are rounded to the nearest code, ties away from zero.
    """
    check_range(x.numel(), layout, out)
    patterns = x.view(torch.int32)
    magnitudes = patterns & ABS_MASK
    steps = (magnitudes + layout.half(nearest) >> layout.shift) - layout.base + 1
    most = torch.where(patterns < 0, layout.negatives, layout.positives)
    steps = steps.clamp(min=1).minimum(most)
    steps = torch.where(magnitudes < layout.first(nearest), 0, steps)
    codes = torch.where((patterns < 0) & (steps > 0), steps + layout.positives, steps)
    pack_bits(codes.to(torch.int32), layout.bits, out)
    return (magnitudes < INF_BITS).all()


def range_decode_add(data: Tensor, layout: Layout, acc: Tensor, scale: float) -> None:
    """``acc += scale * decoded(data)``, the product rounded to float32 before it is added.

    An unused code is read as the last one in use, so any bytes decode to finite numbers.
    """
    check_range(acc.numel(), layout, data)
    codes = torch.empty(acc.numel(), dtype=torch.int32, device=acc.device)
    unpack_bits(data, layout.bits, codes)
    codes = codes.clamp(max=layout.positives + layout.negatives)
    negative = codes > layout.positives
    steps = torch.where(negative, codes - layout.positives, codes)
    values = (steps + (layout.base - 1) << layout.shift).to(torch.int32).view(torch.float32)
    values = torch.where(codes > 0, torch.where(negative, -values, values), 0.0)
    acc.add_(values * torch.tensor(scale, dtype=torch.float32))
