"""Random rounding to powers of two, by one addition to the bit pattern of the float (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.natural``.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Bytes, Floats, Ints, array, f32, i32, u32
from tersegrad.kernels.cpu._hashing import halves, uniform
from tersegrad.kernels.cpu._sign_bits import add_signed_32, pack_slice
from tersegrad.kernels.ops import LANES, NORMAL_BITS, TOP_EXPONENT, check_natural

__all__ = ["natural_decode_add", "natural_encode"]

BLOCK = 1024  # elements whose exponents, then signs are written
NORMAL = np.int32(NORMAL_BITS)
TOP = np.int32(TOP_EXPONENT)


def natural_encode(x: Tensor, key: int, out: Tensor) -> bool:
    """Write exponents and signs to ``out``, which has exactly that many bytes; False if an ``x`` is non-finite."""
    check_natural(x.numel(), out)
    low, high = halves(key)
    patterns, data = array(x, torch.float32).view(np.int32), array(out, torch.uint8)
    return bool(_encode(patterns, low, high, data[: x.numel()], data[x.numel() :]) < INF_BITS)


def natural_decode_add(data: Tensor, acc: Tensor, scale: float) -> None:
    """``acc += scale * value``, the product rounded to float32; an exponent above 254 is read as 254."""
    check_natural(acc.numel(), data)
    packed = array(data, torch.uint8)
    _decode_add(packed[: acc.numel()], packed[acc.numel() :], array(acc, torch.float32), f32(scale))


@numba.njit(nogil=True, cache=True)
def _encode(patterns: Ints, low: np.uint32, high: np.uint32, exponents: Bytes, signs: Bytes) -> np.int32:
    n, largest = patterns.size, i32(0)
    for start in range(0, n, BLOCK):
        stop, first = min(start + BLOCK, n), u32(start)
        part, fields = patterns[start:stop], exponents[start:stop]
        for i in range(part.size):
            magnitude = i32(part[i] & ABS_MASK)
            largest = max(largest, magnitude)
            raised = i32(magnitude + i32(uniform(u32(first + u32(i)), low, high) >> i32(1)))
            field = min(i32(raised >> i32(23)), TOP)
            fields[i] = np.uint8(field if magnitude >= NORMAL else i32(0))
        pack_slice(patterns, start, stop, signs)
    return largest


@numba.njit(nogil=True, cache=True)
def _decode_add(exponents: Bytes, signs: Bytes, acc: Floats, scale: np.float32) -> None:
    n = acc.size
    patterns = np.empty(BLOCK, np.int32)
    values = patterns.view(np.float32)
    scaled = np.empty(BLOCK, np.float32)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        part = exponents[start:stop]
        for i in range(part.size):
            patterns[i] = i32(min(i32(part[i]), TOP) << i32(23))
        for i in range(part.size):
            scaled[i] = scale * values[i]
        at = start
        while at + LANES <= stop:
            add_signed_32(signs, at // 8, scaled, at - start, acc, at)
            at += LANES
        for i in range(at, stop):
            value = scaled[i - start]
            acc[i] += -value if (signs[i // 8] >> (i % 8)) & 1 else value
