"""Floats of N bits with an offset, coded and packed in one pass over memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.range_float``.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Bytes, Floats, Ints, array, i32
from tersegrad.kernels.cpu._arrays import patterns as patterns_of
from tersegrad.kernels.cpu._intrinsics import shift_left, shift_right
from tersegrad.kernels.cpu._packing import CODES, SLACK, pack_block, unpack_block
from tersegrad.kernels.cpu.moments import abs_max as abs_max
from tersegrad.kernels.ops import Layout, check_range

__all__ = ["range_decode_add", "range_encode"]

SIGN = np.int32(-0x80000000)


def range_encode(x: Tensor, layout: Layout, nearest: bool, out: Tensor) -> bool:
    """Write the packed codes of ``x`` to ``out``, which has exactly their size; False if an ``x`` is non-finite."""
    check_range(x.numel(), layout, out)
    largest = _encode(
        patterns_of(x),
        layout.bits,
        i32(layout.shift),
        i32(layout.half(nearest)),
        i32(layout.base - 1),
        i32(layout.first(nearest)),
        i32(layout.positives),
        i32(layout.negatives),
        array(out, torch.uint8),
    )
    return bool(largest < INF_BITS)


def range_decode_add(data: Tensor, layout: Layout, acc: Tensor, scale: float) -> None:
    """``acc += scale * decoded(data)``, the product rounded to float32 before it is added."""
    check_range(acc.numel(), layout, data)
    _decode_add(
        array(data, torch.uint8),
        layout.bits,
        i32(layout.shift),
        i32(layout.base - 1),
        i32(layout.positives),
        i32(layout.negatives),
        array(acc),
        np.float32(scale),
    )


@numba.njit(nogil=True, cache=True)
def _encode(
    patterns: Ints,
    bits: int,
    shift: np.int32,
    half: np.int32,
    below: np.int32,
    first: np.int32,
    positives: np.int32,
    negatives: np.int32,
    out: Bytes,
) -> np.int32:
    n, nbytes, block_nbytes = patterns.size, out.size, CODES * bits // 8
    lanes = np.zeros(CODES, np.uint16)
    words = lanes.view(np.uint64)
    last = np.empty(block_nbytes + SLACK, np.uint8)
    largest = i32(0)
    for start in range(0, n, CODES):
        block, place = patterns[start : start + CODES], start // 8 * bits
        for i in range(block.size):
            pattern = block[i]
            magnitude = i32(pattern & ABS_MASK)
            largest = max(largest, magnitude)
            negative = i32(pattern >> i32(31))  # all ones, or zero
            most = i32(positives + i32(negative & i32(negatives - positives)))
            step = i32(shift_right(i32(magnitude + half), shift) - below)
            step = min(max(step, i32(1)), most)
            code = i32(step + i32(negative & positives))
            lanes[i] = np.uint16(code if magnitude >= first and step > 0 else i32(0))
        if place + block_nbytes + SLACK <= nbytes:
            pack_block(words, bits, out, place)
        else:  # at the end, SLACK bytes more would be out of bounds
            lanes[block.size :] = 0
            pack_block(words, bits, last, 0)
            rest = out[place : place + block_nbytes]
            rest[:] = last[: rest.size]
    return largest


@numba.njit(nogil=True, cache=True)
def _decode_add(
    data: Bytes,
    bits: int,
    shift: np.int32,
    below: np.int32,
    positives: np.int32,
    negatives: np.int32,
    acc: Floats,
    scale: np.float32,
) -> None:
    n, nbytes, block_nbytes = acc.size, data.size, CODES * bits // 8
    lanes = np.empty(CODES, np.uint16)
    words = lanes.view(np.uint64)
    last = np.zeros(block_nbytes + SLACK, np.uint8)
    patterns = np.empty(CODES, np.int32)
    values = patterns.view(np.float32)
    most = i32(positives + negatives)
    for start in range(0, n, CODES):
        block, place = acc[start : start + CODES], start // 8 * bits
        if place + block_nbytes + SLACK <= nbytes:
            unpack_block(data, place, bits, words)
        else:  # at the end, SLACK bytes more would be out of bounds
            rest = data[place : place + block_nbytes]
            last[: rest.size] = rest
            unpack_block(last, 0, bits, words)
        for i in range(CODES):
            code = min(i32(lanes[i]), most)
            negative = code > positives
            step = i32(code - positives) if negative else code
            magnitude = shift_left(i32(step + below), shift)
            signed = i32(magnitude | SIGN) if negative else magnitude
            patterns[i] = signed if code > 0 else i32(0)
        for i in range(block.size):
            block[i] += scale * values[i]
