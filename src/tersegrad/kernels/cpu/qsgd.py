"""Stochastic rounding to few levels, rounded and packed in one pass over memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.qsgd``; here is only how.
"""

from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu.bits import BLOCK, SLACK, pack_block, unpack_block
from tersegrad.kernels.reference import qsgd as reference
from tersegrad.kernels.reference.qsgd import (
    UNIFORM_BITS,
    check_buckets,
    check_codes,
    check_levels,
    check_norm,
    levels_of,
    split_key,
)

__all__ = ["bucket_scales", "qsgd_decode_add", "qsgd_encode", "quantise"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

# Around every operation: Numba widens to 64 bits otherwise, which halves the vectors.
i32: Any = np.int32
u32: Any = np.uint32
f32: Any = np.float32

ABS_MASK = np.int32(0x7FFFFFFF)  # everything but the sign
INF_BITS = np.int32(0x7F800000)  # |x| has these bits or more <=> x is infinite or NaN
SMALLEST, LARGEST = np.float32(reference.SMALLEST), np.float32(reference.LARGEST)
MIX_1, MIX_2, MIX_3 = np.uint32(reference.MIX_1), np.uint32(reference.MIX_2), np.uint32(reference.MIX_3)
CHANCES = np.float32(2.0**UNIFORM_BITS)
INFINITY = np.float32(np.inf)


def bucket_scales(x: Tensor, bucket: int, norm: str, scales: Tensor) -> bool:
    """Write each bucket's largest magnitude ("max") or Euclidean length ("l2"); False if an ``x`` is not finite."""
    check_buckets(x.numel(), bucket, scales)
    check_norm(norm)
    vector, found = _array(x, torch.float32), _array(scales, torch.float32)
    if norm == "max":
        return bool(_largest(vector.view(np.int32), bucket, found.view(np.int32), found))
    return bool(_lengths(vector, bucket, found))


def quantise(x: Tensor, scales: Tensor, bucket: int, levels: int, key: int, out: Tensor) -> None:
    """Write each element's level, -levels to levels, to ``out`` (int32)."""
    check_buckets(x.numel(), bucket, scales)
    check_levels(levels)
    if out.numel() != x.numel():
        raise ValueError(f"{x.numel()} elements have as many levels, and out has room for {out.numel()}")
    low, high = (u32(half) for half in split_key(key))
    vector, steps = _array(x, torch.float32), _array(scales, torch.float32)
    _quantise(vector, steps, bucket, i32(levels), low, high, _array(out, torch.int32))


def qsgd_encode(x: Tensor, scales: Tensor, bucket: int, bits: int, key: int, out: Tensor) -> None:
    """``quantise`` to the levels of ``bits`` bits, packed into ``out``, which has exactly their bytes."""
    check_buckets(x.numel(), bucket, scales)
    check_codes(x.numel(), bits, out)
    low, high = (u32(half) for half in split_key(key))
    vector, steps = _array(x, torch.float32), _array(scales, torch.float32)
    _encode(vector, steps, bucket, bits, i32(levels_of(bits)), low, high, _array(out, torch.uint8))


def qsgd_decode_add(data: Tensor, scales: Tensor, bucket: int, bits: int, acc: Tensor, scale: float) -> None:
    """``acc += scale * (level * step)``, each product rounded to float32."""
    check_buckets(acc.numel(), bucket, scales)
    check_codes(acc.numel(), bits, data)
    codes, steps = _array(data, torch.uint8), _array(scales, torch.float32)
    _decode_add(codes, steps, bucket, bits, i32(levels_of(bits)), _array(acc, torch.float32), f32(scale))


def _array(tensor: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """The memory of a tensor, not a copy of it; the kernels trust what is checked here."""
    plain = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.dtype != dtype or not plain:
        seen = f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        raise TypeError(f"a CPU kernel takes contiguous 1-D {dtype} on cpu, got {seen}")
    if tensor.numel() > ABS_MASK:
        raise ValueError(f"positions are int32: a vector of {tensor.numel()} elements must be split")
    return tensor.detach().numpy()


_intrinsic: Any = numba.extending.intrinsic  # as Numba types it, callers would have to pass ``typing``


@_intrinsic
def _whole(typing: Any, number: Any) -> Any:
    """A float32 that is a whole number as int32; Numba would go through int64, for which there is no vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptosi(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


# --- scales


@numba.njit(nogil=True, cache=True)
def _largest(patterns: Ints, bucket: int, found: Ints, scales: Floats) -> bool:
    """``found`` and ``scales`` are the same memory."""
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
def _uniform(position: Any, low: Any, high: Any) -> Any:
    h = u32(u32(position) + low)
    h = u32(u32(u32(h ^ u32(h >> u32(16))) * MIX_1) + high)
    h = u32(u32(h ^ u32(h >> u32(13))) * MIX_2)
    h = u32(u32(h ^ u32(h >> u32(16))) * MIX_3)
    return i32(u32(h ^ u32(h >> u32(15))) >> u32(32 - UNIFORM_BITS))


@numba.njit(nogil=True, cache=True, forceinline=True)
def _level(x: Any, step: Any, most: Any, position: Any, low: Any, high: Any) -> Any:
    y = x / step
    y = y if y < most else most
    y = y if y > -most else -most
    below = np.floor(y)
    up = f32(_uniform(position, low, high)) < (y - below) * CHANCES
    return i32(_whole(below) + i32(up))


# error_model: Python's would test every divisor for zero, and a test is no vector
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
    n, nbytes, block_nbytes, most = x.size, out.size, BLOCK * bits // 8, f32(levels)
    lanes = np.zeros(BLOCK, np.uint16)
    words = lanes.view(np.uint64)
    last = np.empty(block_nbytes + SLACK, np.uint8)
    for start in range(0, n, BLOCK):
        stop, place, at = min(start + BLOCK, n), start // 8 * bits, start
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
        else:  # at the end there is no room for more than what is meant
            lanes[stop - start :] = 0
            pack_block(words, bits, last, 0)
            rest = out[place : place + block_nbytes]
            rest[:] = last[: rest.size]


@numba.njit(nogil=True, cache=True)
def _decode_add(
    data: Bytes, scales: Floats, bucket: int, bits: int, levels: np.int32, acc: Floats, scale: np.float32
) -> None:
    n, nbytes, block_nbytes, most = acc.size, data.size, BLOCK * bits // 8, i32(2 * levels)
    lanes = np.empty(BLOCK, np.uint16)
    words = lanes.view(np.uint64)
    last = np.zeros(block_nbytes + SLACK, np.uint8)
    for start in range(0, n, BLOCK):
        stop, place, at = min(start + BLOCK, n), start // 8 * bits, start
        if place + block_nbytes + SLACK <= nbytes:
            unpack_block(data, place, bits, words)
        else:  # at the end there is nothing more to read
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
