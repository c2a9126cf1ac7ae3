"""Sorted indices as bits, at a few nanoseconds per index (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.indices``. Bits move through 64-bit words:
a code is one shift into the word being filled, and one instruction counts its zeros when it is read. There are no
branches that depend on a single gap.
"""

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Bytes, Ints, array, u32, u64
from tersegrad.kernels.cpu._intrinsics import float_pattern, leading_zeros, ones, trailing_zeros
from tersegrad.kernels.cpu._packing import load_word, store_word
from tersegrad.kernels.ops import (
    BLOCK,
    COUNT,
    CUT,
    EXPONENT,
    FINE,
    GAP,
    HEADER_BITS,
    KNEES,
    MAX_EXPONENT,
    MAX_PREFIX,
    MAX_WIDTH,
    OUTSIDE,
    PADDING,
    TRAILING,
)

__all__ = ["bitmap_decode", "bitmap_encode", "gap_decode", "gap_encode", "gap_plan"]

Gaps = NDArray[np.uint32]

KNEE = KNEES[1]  # the other one is 0
BEYOND = 32  # zero bytes appended to the data: the last code may end 4 bytes later, 8 are buffered, and 8 are loaded

# Numba computes in 64 bits unless told otherwise in every operation, and turns int64 + uint64 into a float. Hence u32,
# which keeps eight lanes in a vector register, and u64, so that words combine with words only and indices are not
# checked for a negative sign.
i64: Any = np.int64


def gap_plan(indices: Tensor, universe: int, headers: Tensor) -> int:
    """Choose the header of each block; return the bits to write, or -1 if these are not ascending positions."""
    return int(_gap_plan(array(indices, torch.int32), universe, array(headers, torch.uint8)))


def gap_encode(indices: Tensor, headers: Tensor, out: Tensor) -> None:
    """Write the gap code of ``indices`` into ``out``, which has exactly the planned number of bytes."""
    _gap_encode(array(indices, torch.int32), array(headers, torch.uint8), array(out, torch.uint8))


def gap_decode(data: Tensor, universe: int, out: Tensor) -> tuple[int, int]:
    """Read ``len(out)`` indices; return the result code and its place."""
    found, where = _gap_decode(array(data, torch.uint8), universe, array(out, torch.int32))
    return int(found), int(where)


def bitmap_encode(indices: Tensor, out: Tensor) -> None:
    """Set bit i of ``out`` if i is among ``indices``, and clear it otherwise."""
    _bitmap_encode(array(indices, torch.int32), array(out, torch.uint8))


def bitmap_decode(data: Tensor, universe: int, out: Tensor) -> tuple[int, int]:
    """Read the positions of the ``len(out)`` set bits in ``data``; return the result code and its place."""
    found, where = _bitmap_decode(array(data, torch.uint8), universe, array(out, torch.int32))
    return int(found), int(where)


# --- planning


@numba.njit(nogil=True, cache=True)
def _floor_log2(number: int) -> Any:
    return 63 - leading_zeros(u64(number))


@numba.njit(nogil=True, cache=True)
def _gap_plan(indices: Ints, universe: int, headers: Bytes) -> int:
    gaps = np.empty(BLOCK, np.uint32)
    previous, total = i64(-1), 0
    for block in range(len(headers)):
        start = block * BLOCK
        count = min(BLOCK, len(indices) - start)
        if not _block_gaps(indices[start : start + count], previous, gaps):
            return -1
        last = i64(indices[start + count - 1])
        mean = (last - previous - count) // count
        straight, bits = _best_exponent(gaps[:count], _floor_log2(max(mean, 1)), KNEE)
        doubling, fewer = _best_exponent(gaps[:count], straight, 0)
        headers[block] = doubling if fewer < bits else straight | 1 << 5
        total += HEADER_BITS + min(bits, fewer)
        previous = last
    return total if previous < universe else -1


@numba.njit(nogil=True, cache=True)
def _block_gaps(indices: Ints, previous: int, gaps: Gaps) -> Any:
    """Fill ``gaps``; False if one is negative."""
    smallest = i64(indices[0]) - previous - 1
    gaps[0] = smallest
    for i in range(1, len(indices)):
        gap = i64(indices[i]) - i64(indices[i - 1]) - 1
        smallest = min(smallest, gap)
        gaps[i] = gap
    return smallest >= 0


@numba.njit(nogil=True, cache=True)
def _best_exponent(gaps: Gaps, exponent: int, knee: int) -> tuple[int, int]:
    best = _code_bits(gaps, exponent, knee)
    for step in (-1, 1):
        start = exponent
        while 0 <= exponent + step <= MAX_EXPONENT:
            candidate = _code_bits(gaps, exponent + step, knee)
            if candidate >= best:
                break
            exponent, best = exponent + step, candidate
        if exponent != start:
            break
    return exponent, best


@numba.njit(nogil=True, cache=True)
def _code_bits(gaps: Gaps, exponent: int, knee: int) -> Any:
    """Bits of all codes: exponent + 1 + steps + 2 doublings each; doublings = floor(log2(steps left + 1)).

    Few vector units count leading zeros, but all convert to float, whose exponent is floor(log2). A number just below
    a power of two would be rounded up to it; clearing its second highest bit avoids that.
    """
    b, most, one = u32(exponent), u32(knee), u32(1)
    total = u32(0)
    for i in range(len(gaps)):
        quotient = u32(gaps[i] >> b)
        steps = min(quotient, most)
        left = u32(u32(quotient - steps) + one)
        doublings = u32(u32(float_pattern(u32(left & ~u32(left >> one))) >> u32(23)) - u32(127))
        total = u32(total + u32(steps + u32(doublings << one)))
    return i64(total) + len(gaps) * (exponent + 1)


# --- writing


@numba.njit(nogil=True, cache=True)
def _gap_encode(indices: Ints, headers: Bytes, out: Bytes) -> None:
    word, used, at = u64(0), 0, 0
    previous = i64(-1)
    for block in range(len(headers)):
        header = i64(headers[block])
        exponent, knee = header & 31, KNEE * (header >> 5)
        top = i64(1) << exponent
        word, used, at = _put(out, word, used, at, u64(header), HEADER_BITS)
        for i in range(block * BLOCK, min((block + 1) * BLOCK, len(indices))):
            index = i64(indices[u64(i)])
            gap = index - previous - 1
            previous = index
            steps = min(gap >> exponent, knee)
            v = gap - (steps << exponent) + top
            width = _floor_log2(v)
            zeros = steps + width - exponent
            code = u64(((v ^ (1 << width)) << 1) | 1)
            if zeros + 1 + width > 64:  # a huge gap among tiny ones
                word, used, at = _put(out, word, used, at, u64(0), zeros)
                word, used, at = _put(out, word, used, at, code, 1 + width)
            else:
                word, used, at = _put(out, word, used, at, code << u64(zeros), zeros + 1 + width)
    for i in range(at, len(out)):
        out[i] = word & u64(255)
        word >>= u64(8)


@numba.njit(nogil=True, cache=True, forceinline=True)
def _put(out: Bytes, word: Any, used: int, at: int, code: Any, width: int) -> tuple[Any, int, int]:
    """Append ``width`` bits to the ``used`` ones in ``word``; write the word once it is full, and begin another."""
    word |= code << u64(used)
    if used + width < 64:
        return word, used + width, at
    store_word(out, at, word)
    word = (code >> u64(1)) >> u64(63 - used)  # in two shifts, as a shift by 64 is undefined
    return word, used + width - 64, at + 8


@numba.njit(nogil=True, cache=True)
def _bitmap_encode(indices: Ints, out: Bytes) -> None:
    out[:] = 0
    for index in indices:
        out[index >> 3] |= 1 << (index & 7)


# --- reading


@numba.njit(nogil=True, cache=True)
def _gap_decode(data: Bytes, universe: int, out: Ints) -> tuple[int, int]:
    padded = _padded(data)
    end = 8 * len(data)
    word, ready, at = u64(0), 0, 0  # the position is 8 * at - ready
    index = i64(-1)
    for start in range(0, len(out), BLOCK):
        word, ready, at = _refill(padded, word, ready, at)
        header = i64(word & u64(63))
        word >>= u64(HEADER_BITS)
        ready -= HEADER_BITS
        if 8 * at - ready > end:
            return CUT, start
        exponent, knee = header & 31, KNEE * (header >> 5)
        if exponent > MAX_EXPONENT:
            return EXPONENT, exponent
        # Within a block nothing checks for the end of the data, as the zeros appended to it are not a code,
        # nor for the end of the universe, as indices only grow.
        for i in range(start, min(start + BLOCK, len(out))):
            word, ready, at = _refill(padded, word, ready, at)
            zeros = trailing_zeros(word)
            doublings = max(zeros - knee, 0)
            width = exponent + doublings
            if width > MAX_WIDTH:
                return (CUT if 8 * at - ready + MAX_PREFIX > end else GAP), i
            word >>= u64(zeros + 1)
            ready -= zeros + 1
            if width > ready:
                word, ready, at = _refill(padded, word, ready, at)
            low = i64(word & ((u64(1) << u64(width)) - u64(1)))
            word >>= u64(width)
            ready -= width
            index += low + (1 << width) + ((zeros - doublings - 1) << exponent) + 1
            out[u64(i)] = index
        if 8 * at - ready > end:
            return CUT, start
        if index >= universe:
            return OUTSIDE, start
    return _check_end(data, 8 * at - ready)


@numba.njit(nogil=True, cache=True)
def _padded(data: Bytes) -> Bytes:
    """A copy with zeros appended. Copying is cheap; checking for the end at every word would cost a third more."""
    padded = np.empty(len(data) + BEYOND, np.uint8)
    for i in range(len(data)):  # a slice assignment takes Numba five seconds longer to compile
        padded[i] = data[i]
    for i in range(len(data), len(padded)):
        padded[i] = 0
    return padded


@numba.njit(nogil=True, cache=True, forceinline=True)
def _refill(data: Bytes, word: Any, ready: int, at: int) -> tuple[Any, int, int]:
    """Make 56 or more bits ready. Bits above the ready ones may be set already: the same bits are or-ed in."""
    return word | (load_word(data, at) << u64(ready)), ready | 56, at + ((63 - ready) >> 3)


@numba.njit(nogil=True, cache=True)
def _check_end(data: Bytes, used: int) -> tuple[int, int]:
    if len(data) > (used + 7) >> 3:
        return TRAILING, (used + 7) >> 3
    if used & 7 and data[len(data) - 1] >> (used & 7):
        return PADDING, used
    return FINE, 0


@numba.njit(nogil=True, cache=True)
def _bitmap_decode(data: Bytes, universe: int, out: Ints) -> tuple[int, int]:
    found, where = _check_end(data, universe)
    if found != FINE:
        return found, where
    whole = len(data) & ~7
    count = 0
    for at in range(0, whole, 8):
        count += ones(load_word(data, at))
    for at in range(whole, len(data)):
        count += ones(u64(data[at]))
    if count != len(out):
        return COUNT, count
    i = 0
    for at in range(0, whole, 8):
        i = _positions(load_word(data, at), 8 * at, out, i)
    for at in range(whole, len(data)):
        i = _positions(u64(data[at]), 8 * at, out, i)
    return FINE, 0


@numba.njit(nogil=True, cache=True, forceinline=True)
def _positions(word: Any, base: int, out: Ints, i: int) -> int:
    """Append the positions of the set bits of ``word``, whose lowest bit has position ``base``."""
    while word:
        out[i] = base + trailing_zeros(word)
        word &= word - u64(1)
        i += 1
    return i
