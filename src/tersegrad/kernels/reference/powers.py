"""Values as signed powers of two relative to the largest of their group, in plain torch: the definition."""

import torch
from torch import Tensor

from tersegrad.kernels.ops import DEEPEST, NOTHING, Answer, check_power_groups
from tersegrad.kernels.ops import FAINT as FAINT

__all__ = ["power_decode", "power_encode"]

_HALF_BINADE = 0x00400000  # added to a float's bits, it carries into the exponent from 1.5 * 2^e on


def power_encode(values: Tensor, groups: Tensor, exponents: Tensor, codes: Tensor) -> Answer:
    """Write the groups' exponents (int8), E = floor(log2 max |value|), and codes (uint8): d + 8 * (value < 0).

    The nearest power of two (from 1.5 * 2^e on, the larger one) is 2^(E - d), with d from 0 to 7. Where it would be
    smaller than 2^(E - 7), or E is that of denormals, the value underflows: its code is that of d = 7 with ``FAINT``
    added. Returns how many values underflow. ``groups`` are lengths (int32) that add up to the number of values.
    """
    check_power_groups(values.numel(), groups, exponents, codes)
    if not groups.numel():
        return 0
    largest = torch.segment_reduce(values.abs(), "max", lengths=groups.to(torch.int64), initial=0.0)
    top = (largest.view(torch.int32) >> 23) - 127
    top = top.masked_fill(top == -127, NOTHING)
    exponents.copy_(top)
    nearest = ((values.view(torch.int32) & 0x7FFFFFFF) + _HALF_BINADE >> 23) - 127
    own = top.repeat_interleave(groups, output_size=values.numel())
    depth = own - nearest
    faint = (depth > DEEPEST) | (own == NOTHING)
    code = depth.clamp(0, DEEPEST) | (values < 0).to(torch.int32) * 8
    codes.copy_(torch.where(faint, (code & 8) | DEEPEST | FAINT, code))
    return faint.sum()


def power_decode(codes: Tensor, groups: Tensor, exponents: Tensor, values: Tensor) -> None:
    """Write the values (float32) of the codes' low 4 bits: +-2^(E - d), and 0 below the smallest normal float."""
    check_power_groups(values.numel(), groups, exponents, codes)
    own = exponents.to(torch.int32).repeat_interleave(groups, output_size=values.numel())
    powers = own - (codes & DEEPEST).to(torch.int32)
    magnitudes = (powers + 127).clamp_min(0).bitwise_left_shift(23).view(torch.float32)
    values.copy_(torch.where(codes & 8 > 0, -magnitudes, magnitudes))
