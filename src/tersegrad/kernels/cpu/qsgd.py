"""Stochastic rounding to few levels, rounded and packed in one pass over memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.qsgd``.
"""

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Bytes, Floats, Ints, array, f32, i32, u32
from tersegrad.kernels.cpu._hashing import CHANCES, halves, uniform
from tersegrad.kernels.cpu._intrinsics import whole
from tersegrad.kernels.cpu._packing import CODES, SLACK, pack_block, unpack_block
from tersegrad.kernels.ops import (
    MIN_SCALE,
    QSGD_MAX_SCALE,
    check_buckets,
    check_level_codes,
    check_norm,
    check_quantise,
    levels_of,
)

__all__ = ["bucket_scales", "qsgd_decode_add", "qsgd_encode", "quantise"]

SMALLEST, LARGEST = np.float32(MIN_SCALE), np.float32(QSGD_MAX_SCALE)
INFINITY = np.float32(np.inf)


def bucket_scales(x: Tensor, bucket: int, norm: str, scales: Tensor) -> bool:
    """Write each bucket's largest magnitude ("max") or Euclidean norm ("l2"); False if an ``x`` is non-finite."""
    check_buckets(x.numel(), bucket, scales)
    check_norm(norm)
    vector, found = array(x), array(scales)
    if norm == "max":
        return bool(_largest(vector.view(np.int32), bucket, found.view(np.int32), found))
    return bool(_lengths(vector, bucket, found))


def quantise(x: Tensor, scales: Tensor, bucket: int, levels: int, key: int, out: Tensor) -> None:
    """Write each element's level, -levels to levels, to ``out`` (int32)."""
    check_quantise(x, scales, bucket, levels, out)
    low, high = halves(key)
    vector, steps = array(x), array(scales)
    _quantise(vector, steps, bucket, i32(levels), low, high, array(out, torch.int32))


def qsgd_encode(x: Tensor, scales: Tensor, bucket: int, bits: int, key: int, out: Tensor) -> None:
    """``quantise`` to the levels of ``bits`` bits, packed into ``out``, which has exactly that many bytes."""
    check_buckets(x.numel(), bucket, scales)
    check_level_codes(x.numel(), bits, out)
    low, high = halves(key)
    vector, steps = array(x), array(scales)
    _encode(vector, steps, bucket, bits, i32(levels_of(bits)), low, high, array(out, torch.uint8))


def qsgd_decode_add(data: Tensor, scales: Tensor, bucket: int, bits: int, acc: Tensor, scale: float) -> None:
    """``acc += scale * (level * step)``, each product rounded to float32."""
    check_buckets(acc.numel(), bucket, scales)
    check_level_codes(acc.numel(), bits, data)
    codes, steps = array(data, torch.uint8), array(scales)
    _decode_add(codes, steps, bucket, bits, i32(levels_of(bits)), array(acc), f32(scale))


# --- scales


@numba.njit(nogil=True, cache=True)
def _largest(patterns: Ints, bucket: int, found: Ints, scales: Floats) -> bool:
    """``found`` and ``scales`` share their memory."""
    largest = i32(0)
    for b in range(found.size):
        part = patterns[b * bucket : (b + 1) * bucket]
        top = i32(0)
        for i in range(part.size):
            top = max(top, i32(part[i] & ABS_MASK))
        largest = max(largest, top)
        found[b] = top
        scales[b] = f32(0) if scales[b] < SMALLEST else min(scales[b], LARGEST)
    return bool(largest < INF_BITS)


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _lengths(x: Floats, bucket: int, scales: Floats) -> bool:
    total = 0.0
    for b in range(scales.size):
        part = x[b * bucket : (b + 1) * bucket]
        squares = 0.0
        for i in range(part.size):
            squares += np.float64(part[i]) * np.float64(part[i])
        total += squares
        length = np.sqrt(squares)
        scales[b] = f32(0) if length < SMALLEST else f32(min(length, np.float64(LARGEST)))
    return bool(total < np.inf)  # squares of float32 cannot overflow float64


# --- levels


@numba.njit(nogil=True, cache=True, forceinline=True)
def _level(x: Any, step: Any, most: Any, position: Any, low: Any, high: Any) -> Any:
    y = x / step
    y = y if y < most else most
    y = y if y > -most else -most
    below = np.floor(y)
    up = f32(uniform(position, low, high)) < (y - below) * CHANCES
    return i32(whole(below) + i32(up))


# error_model: Python's would check every divisor for zero, which prevents vectorisation
@numba.njit(nogil=True, cache=True, error_model="numpy")
def _quantise(
    x: Floats, scales: Floats, bucket: int, levels: np.int32, low: np.uint32, high: np.uint32, out: Ints
) -> None:
    most = f32(levels)
    for b in range(scales.size):
        part, levels_out = x[b * bucket : (b + 1) * bucket], out[b * bucket : (b + 1) * bucket]
        step = scales[b] / most if scales[b] > f32(0) else INFINITY
        first = u32(b * bucket)
        for i in range(part.size):
            levels_out[i] = _level(part[i], step, most, u32(first + u32(i)), low, high)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _encode(
    x: Floats, scales: Floats, bucket: int, bits: int, levels: np.int32, low: np.uint32, high: np.uint32, out: Bytes
) -> None:
    n, nbytes, block_nbytes, most = x.size, out.size, CODES * bits // 8, f32(levels)
    lanes = np.zeros(CODES, np.uint16)
    words = lanes.view(np.uint64)
    last = np.empty(block_nbytes + SLACK, np.uint8)
    for start in range(0, n, CODES):
        stop, place, at = min(start + CODES, n), start // 8 * bits, start
        while at < stop:  # the parts of buckets in this block
            b = at // bucket
            end = min(stop, (b + 1) * bucket)
            part, codes, first = x[at:end], lanes[at - start : end - start], u32(at)
            step = scales[b] / most if scales[b] > f32(0) else INFINITY
            for i in range(part.size):
                level = _level(part[i], step, most, u32(first + u32(i)), low, high)
                codes[i] = np.uint16(i32(level + levels))
            at = end
        if place + block_nbytes + SLACK <= nbytes:
            pack_block(words, bits, out, place)
        else:  # at the end, SLACK bytes more would be out of bounds
            lanes[stop - start :] = 0
            pack_block(words, bits, last, 0)
            rest = out[place : place + block_nbytes]
            rest[:] = last[: rest.size]


@numba.njit(nogil=True, cache=True)
def _decode_add(
    data: Bytes, scales: Floats, bucket: int, bits: int, levels: np.int32, acc: Floats, scale: np.float32
) -> None:
    n, nbytes, block_nbytes, most = acc.size, data.size, CODES * bits // 8, i32(2 * levels)
    lanes = np.empty(CODES, np.uint16)
    words = lanes.view(np.uint64)
    last = np.zeros(block_nbytes + SLACK, np.uint8)
    for start in range(0, n, CODES):
        stop, place, at = min(start + CODES, n), start // 8 * bits, start
        if place + block_nbytes + SLACK <= nbytes:
            unpack_block(data, place, bits, words)
        else:  # at the end, SLACK bytes more would be out of bounds
            rest = data[place : place + block_nbytes]
            last[: rest.size] = rest
            unpack_block(last, 0, bits, words)
        while at < stop:  # the parts of buckets in this block
            b = at // bucket
            end = min(stop, (b + 1) * bucket)
            part, codes = acc[at:end], lanes[at - start : end - start]
            step = scales[b] / f32(levels)
            for i in range(part.size):
                level = i32(min(i32(codes[i]), most) - levels)
                part[i] += scale * (f32(level) * step)
            at = end
