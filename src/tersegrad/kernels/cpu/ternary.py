"""Ternary digits, drawn and packed five to a byte in one pass over memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.ternary``.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Bytes, Floats, Ints, array, f32, i32, u32
from tersegrad.kernels.cpu._hashing import CHANCES, halves, uniform
from tersegrad.kernels.ops import MIN_SCALE, TERNARY_MAX_BYTE, check_buckets, check_ternary, ternary_refusal
from tersegrad.kernels.ops import TERNARY_BYTES as BYTES
from tersegrad.kernels.ops import TERNARY_DIGITS as DIGITS

__all__ = ["ternary_decode_add", "ternary_encode", "ternary_scales"]

u16: Any = np.uint16

BLOCK = DIGITS * BYTES  # elements packed at a time
SMALLEST = np.float64(MIN_SCALE)


def ternary_scales(x: Tensor, bucket: int, clip: float, scales: Tensor) -> bool:
    """Write each group's largest magnitude, but at most ``clip`` times its root mean square; False if non-finite."""
    check_buckets(x.numel(), bucket, scales)
    vector = array(x)
    return bool(_scales(vector, vector.view(np.int32), bucket, float(clip), array(scales)))


def ternary_encode(x: Tensor, scales: Tensor, bucket: int, key: int, out: Tensor) -> None:
    """Write the packed digits to ``out``, which has exactly that many bytes."""
    check_buckets(x.numel(), bucket, scales)
    check_ternary(x.numel(), out)
    low, high = halves(key)
    vector, steps = array(x), array(scales)
    _encode(vector, vector.view(np.int32), steps, bucket, low, high, array(out, torch.uint8))


def ternary_decode_add(data: Tensor, scales: Tensor, bucket: int, acc: Tensor, scale: float) -> None:
    """``acc += (digit - 1) * (scale * s)``, the product rounded to float32; ValueError if a byte is above 242."""
    check_buckets(acc.numel(), bucket, scales)
    check_ternary(acc.numel(), data)
    packed = array(data, torch.uint8)
    if (largest := int(_largest(packed))) > TERNARY_MAX_BYTE:
        raise ternary_refusal(largest)
    _decode_add(packed, array(scales), bucket, array(acc), f32(scale))


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def _scales(x: Floats, patterns: Ints, bucket: int, clip: float, scales: Floats) -> bool:
    n, everything, clipped = x.size, i32(0), clip < np.inf
    one = np.zeros(1, np.int32)
    for g in range(scales.size):
        first, end, top, squares = g * bucket, min((g + 1) * bucket, n), i32(0), 0.0
        for start in range(first, end, BLOCK):
            stop = min(start + BLOCK, end)
            part = patterns[start:stop]
            for i in range(part.size):
                top = max(top, i32(part[i] & ABS_MASK))
            if clipped:
                again = x[start:stop]
                for i in range(again.size):
                    squares += np.float64(again[i]) * np.float64(again[i])
        everything = max(everything, top)
        one[0] = top
        found = np.float64(one.view(np.float32)[0])
        if clipped:
            found = min(found, clip * np.sqrt(squares / (end - first)))
        scales[g] = f32(0) if found < SMALLEST else f32(found)
    return bool(everything < INF_BITS)


# error_model: Python's would check every divisor for zero, which prevents vectorisation
@numba.njit(nogil=True, cache=True, error_model="numpy")
def _encode(
    x: Floats, patterns: Ints, scales: Floats, bucket: int, low: np.uint32, high: np.uint32, out: Bytes
) -> None:
    n = x.size
    digits = np.empty(BLOCK, np.uint8)
    for start in range(0, n, BLOCK):
        stop, at = min(start + BLOCK, n), start
        while at < stop:  # the parts of groups in this block
            g = at // bucket
            end = min(stop, (g + 1) * bucket)
            part, signs, codes, first = x[at:end], patterns[at:end], digits[at - start : end - start], u32(at)
            factor = CHANCES / scales[g] if scales[g] > f32(0) else f32(0)
            for i in range(part.size):
                draw = f32(uniform(u32(first + u32(i)), low, high))
                way = i32(i32(signs[i] >> i32(31)) | i32(1))  # -1 or 1
                codes[i] = np.uint8(i32(i32(1) + (way if draw < abs(part[i]) * factor else i32(0))))
            at = end
        count = (stop - start + DIGITS - 1) // DIGITS
        digits[stop - start :] = 0
        packed = out[start // DIGITS : start // DIGITS + count]
        d0, d1, d2 = digits[:count], digits[count : 2 * count], digits[2 * count : 3 * count]
        d3, d4 = digits[3 * count : 4 * count], digits[4 * count : 5 * count]
        for j in range(packed.size):
            total = u16(u16(u16(d4[j]) * u16(3)) + u16(d3[j]))
            total = u16(u16(total * u16(3)) + u16(d2[j]))
            total = u16(u16(total * u16(3)) + u16(d1[j]))
            packed[j] = np.uint8(u16(u16(total * u16(3)) + u16(d0[j])))


@numba.njit(nogil=True, cache=True)
def _largest(data: Bytes) -> np.uint8:
    largest = np.uint8(0)
    for i in range(data.size):
        largest = max(largest, data[i])
    return largest


@numba.njit(nogil=True, cache=True)
def _decode_add(data: Bytes, scales: Floats, bucket: int, acc: Floats, scale: np.float32) -> None:
    n = acc.size
    digits = np.empty(BLOCK, np.uint8)
    for start in range(0, n, BLOCK):
        stop, at = min(start + BLOCK, n), start
        count = (stop - start + DIGITS - 1) // DIGITS
        packed = data[start // DIGITS : start // DIGITS + count]
        d0, d1, d2 = digits[:count], digits[count : 2 * count], digits[2 * count : 3 * count]
        d3, d4 = digits[3 * count : 4 * count], digits[4 * count : 5 * count]
        for j in range(packed.size):
            rest = u16(packed[j])
            third = u16(u16(rest * u16(171)) >> u16(9))  # rest // 3, for a byte
            d0[j] = np.uint8(u16(rest - u16(third * u16(3))))
            ninth = u16(u16(third * u16(171)) >> u16(9))
            d1[j] = np.uint8(u16(third - u16(ninth * u16(3))))
            third = u16(u16(ninth * u16(171)) >> u16(9))
            d2[j] = np.uint8(u16(ninth - u16(third * u16(3))))
            ninth = u16(u16(third * u16(171)) >> u16(9))
            d3[j] = np.uint8(u16(third - u16(ninth * u16(3))))
            d4[j] = np.uint8(ninth)
        while at < stop:  # the parts of groups in this block
            g = at // bucket
            end = min(stop, (g + 1) * bucket)
            part, codes, step = acc[at:end], digits[at - start : end - start], f32(scale * scales[g])
            for i in range(part.size):
                part[i] += f32(i32(i32(codes[i]) - i32(1))) * step
            at = end
