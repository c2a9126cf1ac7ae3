"""Codes of the dynamic 8-bit map by one table lookup (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.blockwise``.

The numbers between two powers of two are split into 64 cells, so small that none contains two borders of the map. The
top bits of the float32 pattern are the cell, the low 17 bits the place in it. A cell's table entry has the position
below its border in the top bits and 2^17 - border in the low ones: adding the low bits of a number carries into the
position exactly from the border on. So no search is needed.
"""

from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Bytes, Floats, Ints, array, f32, i32, u32
from tersegrad.kernels.ops import MIN_SCALE, ZERO_CODE, check_buckets, check_byte_codes, dynamic_borders, dynamic_map

__all__ = ["block_scales", "blockwise_decode_add", "blockwise_encode"]

LOW_BITS = 17
LOW = np.int32((1 << LOW_BITS) - 1)
PART = 1024  # elements that are divided by the scale and then looked up
SMALLEST = np.float32(MIN_SCALE)
MIDDLE = np.int32(ZERO_CODE)


def block_scales(x: Tensor, block: int, scales: Tensor) -> bool:
    """Write each block's largest element with its sign, zero below 2^-100; False if an ``x`` is non-finite."""
    check_buckets(x.numel(), block, scales)
    found = array(scales)
    return bool(_scales(array(x).view(np.int32), block, found.view(np.int32), found))


def blockwise_encode(x: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Write each element's code to ``out``."""
    check_byte_codes(x.numel(), out)
    check_buckets(x.numel(), block, scales)
    vector, steps = array(x), array(scales)
    table, first = _cells()
    codes = array(out, torch.uint8)
    _encode(vector, vector.view(np.int32), steps, steps.view(np.int32), block, table, i32(first), codes)


def blockwise_decode_add(data: Tensor, scales: Tensor, block: int, acc: Tensor, scale: float) -> None:
    """``acc += scale * (number * block's scale)``, the number and each product rounded to float32."""
    check_byte_codes(acc.numel(), data)
    check_buckets(acc.numel(), block, scales)
    codes, steps = array(data, torch.uint8), array(scales)
    _decode_add(codes, steps, block, _numbers(), array(acc), f32(scale))


@cache
def _numbers() -> Floats:
    return dynamic_map().to(torch.float32).numpy()


@cache
def _cells() -> tuple[Ints, int]:
    """For every cell, (position below its border << 17) + 2^17 - place of the border; and the first cell's number.

    A cell without a border gets one that is never reached. The first cell stands for all smaller numbers, the last one,
    from 1 on, for all larger ones.
    """
    patterns = dynamic_borders().numpy().view(np.int32).astype(np.int64)
    first, last = int(patterns[0] >> LOW_BITS) - 1, 0x3F800000 >> LOW_BITS
    starts = np.arange(first, last + 1) << LOW_BITS
    below = np.searchsorted(patterns, starts, side="left")  # borders before the cell
    inside = np.append(patterns, np.iinfo(np.int64).max)[below] - starts
    within = inside <= LOW
    table = (below << LOW_BITS) + np.where(within, (1 << LOW_BITS) - inside, 0)
    assert np.all(np.diff(below)[within[:-1]] == 1), "a cell contains at most one border"
    return table.astype(np.int32), first


@numba.njit(nogil=True, cache=True)
def _scales(patterns: Ints, block: int, found: Ints, scales: Floats) -> bool:
    """``found`` and ``scales`` share their memory."""
    largest = i32(0)
    for b in range(found.size):
        part = patterns[b * block : (b + 1) * block]
        top, plus = i32(0), i32(0)
        for i in range(part.size):
            top = max(top, i32(part[i] & ABS_MASK))
            plus = max(plus, part[i])  # a negative float is a negative integer
        largest = max(largest, top)
        found[b] = top
        if scales[b] < SMALLEST:
            scales[b] = f32(0)
        elif plus != top:
            scales[b] = -scales[b]
    return bool(largest < INF_BITS)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _encode(
    x: Floats, bits: Ints, scales: Floats, scale_bits: Ints, block: int, table: Ints, first: np.int32, out: Bytes
) -> None:
    n, last = x.size, i32(table.size - 1)
    quotients, cells, entries = np.empty(PART, np.float32), np.empty(PART, np.uint32), np.empty(PART, np.int32)
    patterns = quotients.view(np.int32)
    for b in range(scales.size):
        end, flip = min((b + 1) * block, n), scale_bits[b]
        inverse = f32(1) / abs(scales[b]) if scales[b] != f32(0) else f32(0)
        for start in range(b * block, end, PART):
            stop = min(start + PART, end)
            part, signs, codes = x[start:stop], bits[start:stop], out[start:stop]
            for i in range(part.size):
                quotients[i] = abs(part[i]) * inverse
            for i in range(part.size):
                cells[i] = u32(min(max(i32(i32(patterns[i] >> i32(LOW_BITS)) - first), i32(0)), last))
            for i in range(part.size):  # a loop of its own, so that the next one is vectorised
                entries[i] = table[cells[i]]
            for i in range(part.size):
                step = i32(i32(entries[i] + i32(patterns[i] & LOW)) >> i32(LOW_BITS))
                minus = i32(i32(signs[i] ^ flip) >> i32(31))  # all ones, or zero
                step = min(step, i32(MIDDLE + i32(minus + i32(1))))
                codes[i] = np.uint8(i32(MIDDLE + i32(i32(step ^ minus) - minus)))


@numba.njit(nogil=True, cache=True)
def _decode_add(data: Bytes, scales: Floats, block: int, numbers: Floats, acc: Floats, scale: np.float32) -> None:
    n = acc.size
    for b in range(scales.size):
        part, codes, step = acc[b * block : min((b + 1) * block, n)], data[b * block : (b + 1) * block], scales[b]
        for i in range(part.size):
            part[i] += scale * (numbers[codes[i]] * step)
