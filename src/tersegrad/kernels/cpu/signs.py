"""Signs as bits, and means of groups, in one pass over memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.signs``.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Bytes, Floats, Ints, array, f32, i32, u32
from tersegrad.kernels.cpu._hashing import halves, uniform
from tersegrad.kernels.cpu._sign_bits import add_either_32, pack_slice
from tersegrad.kernels.ops import LANES, UNIFORM_BITS, check_sign_groups, check_signs

__all__ = ["break_ties", "one_bit_encode", "scaled_sign_encode", "signs_decode_add"]

BLOCK = 1024  # elements that are summed and then read again while they are in the L1 cache
HALF = np.int32(1 << UNIFORM_BITS - 1)


def scaled_sign_encode(x: Tensor, bucket: int, means: Tensor, out: Tensor) -> bool:
    """Write each group's mean of ``|x|``, and all signs to ``out``; False if an ``x`` is non-finite."""
    check_sign_groups(x.numel(), bucket, means.numel())
    check_signs(x.numel(), out)
    vector, found = array(x), array(means)
    return bool(_scaled_sign(vector, vector.view(np.int32), bucket, found, array(out, torch.uint8)))


def one_bit_encode(x: Tensor, bucket: int, means: Tensor, out: Tensor) -> bool:
    """Write each group's means of either sign, and all signs to ``out``; False if an ``x`` is non-finite."""
    check_sign_groups(x.numel(), bucket, means.numel() / 2)
    check_signs(x.numel(), out)
    vector, found = array(x), array(means)
    return bool(_one_bit(vector, vector.view(np.int32), bucket, found, array(out, torch.uint8)))


def signs_decode_add(data: Tensor, values: Tensor, bucket: int, acc: Tensor, scale: float) -> None:
    """``acc += scale * value``, the product rounded to float32."""
    check_sign_groups(acc.numel(), bucket, values.numel() / 2)
    check_signs(acc.numel(), data)
    total = array(acc)
    _decode_add(array(data, torch.uint8), array(values), bucket, total, f32(scale))


def break_ties(votes: Tensor, key: int) -> None:
    """Turn every zero into +1 or -1, by the highest bit of the hash of the key and the position."""
    low, high = halves(key)
    _break_ties(array(votes), low, high)


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def _scaled_sign(x: Floats, patterns: Ints, bucket: int, means: Floats, out: Bytes) -> bool:
    n, everything = x.size, 0.0
    for g in range(means.size):
        first, end, total = g * bucket, min((g + 1) * bucket, n), 0.0
        for start in range(first, end, BLOCK):
            stop = min(start + BLOCK, end)
            part = x[start:stop]
            for i in range(part.size):
                total += np.float64(abs(part[i]))
            pack_slice(patterns, start, stop, out)
        everything += total
        means[g] = f32(total / (end - first))
    return bool(everything < np.inf)  # a float64 sum of finite float32 magnitudes is finite; NaN compares false


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def _one_bit(x: Floats, patterns: Ints, bucket: int, means: Floats, out: Bytes) -> bool:
    n, everything = x.size, 0.0
    for g in range(means.size // 2):
        first, end, plus, minus, negatives = g * bucket, min((g + 1) * bucket, n), 0.0, 0.0, 0
        for start in range(first, end, BLOCK):
            stop = min(start + BLOCK, end)
            part, signs = x[start:stop], patterns[start:stop]
            for i in range(part.size):
                plus += np.float64(part[i]) if signs[i] >= 0 else 0.0
                minus += np.float64(part[i]) if signs[i] < 0 else 0.0
            count = i32(0)
            for i in range(signs.size):
                count = i32(count + i32(signs[i] < 0))
            negatives += int(count)
            pack_slice(patterns, start, stop, out)
        everything += plus - minus
        positives = end - first - negatives
        means[2 * g] = f32(plus / positives) if positives > 0 else f32(0)
        means[2 * g + 1] = f32(minus / negatives) if negatives > 0 else f32(0)
    return bool(everything < np.inf)


@numba.njit(nogil=True, cache=True)
def _decode_add(data: Bytes, values: Floats, bucket: int, acc: Floats, scale: np.float32) -> None:
    n = acc.size
    for g in range(values.size // 2):
        at, end = g * bucket, min((g + 1) * bucket, n)
        plus, minus = f32(scale * values[2 * g]), f32(scale * values[2 * g + 1])
        while at + LANES <= end:
            add_either_32(data, at // 8, plus, minus, acc, at)
            at += LANES
        for i in range(at, end):
            acc[i] += minus if (data[i // 8] >> (i % 8)) & 1 else plus


@numba.njit(nogil=True, cache=True)
def _break_ties(votes: Floats, low: np.uint32, high: np.uint32) -> None:
    for i in range(votes.size):
        coin = f32(1) if uniform(u32(i), low, high) >= HALF else f32(-1)
        votes[i] = coin if votes[i] == f32(0) else votes[i]
