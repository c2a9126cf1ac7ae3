"""Values as signed powers of two relative to the largest of their group: one pass finds it, one writes the codes."""

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Bytes, Ints, array, patterns
from tersegrad.kernels.ops import DEEPEST, FAINT, NOTHING, check_power_groups

__all__ = ["power_decode", "power_encode"]


def power_encode(values: Tensor, groups: Tensor, exponents: Tensor, codes: Tensor) -> int:
    """Write the groups' exponents and the values' codes; return how many underflow (see ``reference``)."""
    check_power_groups(values.numel(), groups, exponents, codes)
    arrays = array(groups, torch.int32), array(exponents, torch.int8), array(codes, torch.uint8)
    return int(_encode(patterns(values), *arrays))


def power_decode(codes: Tensor, groups: Tensor, exponents: Tensor, values: Tensor) -> None:
    """Write the values that the codes stand for (see ``reference``)."""
    check_power_groups(values.numel(), groups, exponents, codes)
    _decode(array(codes, torch.uint8), array(groups, torch.int32), array(exponents, torch.int8), patterns(values))


@numba.njit(nogil=True, cache=True)
def _encode(bits: Ints, groups: Ints, exponents: NDArray[np.int8], codes: Bytes) -> int:
    faint, start = 0, 0
    for g in range(groups.size):
        end = start + int(groups[g])
        largest = np.int32(0)
        for i in range(start, end):
            largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
        top = np.int32(np.int32(largest >> 23) - 127)
        exponents[g] = NOTHING if top == -127 else top
        least = np.int32(top - DEEPEST) if top > -127 else np.int32(256)  # larger than any exponent
        for i in range(start, end):
            magnitude = np.int32(bits[i] & np.int32(0x7FFFFFFF))
            nearest = np.int32(np.int32(np.int32(magnitude + np.int32(0x00400000)) >> 23) - 127)
            weak = np.int32(nearest < least)
            depth = np.int32(min(np.int32(top - nearest), np.int32(DEEPEST)))
            depth = np.int32(max(depth, np.int32(0)))
            depth = np.int32(DEEPEST) if weak else depth
            # x < 0, which is false for minus zero
            sign = np.int32(8) if bits[i] < 0 and magnitude > 0 else np.int32(0)
            codes[i] = np.uint8(depth | sign | weak * FAINT)
            faint += int(weak)
        start = end
    return faint


@numba.njit(nogil=True, cache=True)
def _decode(codes: Bytes, groups: Ints, exponents: NDArray[np.int8], bits: Ints) -> None:
    start = 0
    for g in range(groups.size):
        end = start + int(groups[g])
        for i in range(start, end):
            power = int(exponents[g]) - int(codes[i] & 7) + 127
            magnitude = np.int32(max(power, 0) << 23)
            bits[i] = np.int32(magnitude | np.int32(-2147483648)) if codes[i] & 8 else magnitude
        start = end
