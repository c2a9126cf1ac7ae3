"""The largest bins of spectra, found while a block is in the cache (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.largest_bins``. Only candidates are
written: neither all bins nor their magnitudes go to memory. Squares are compared with the square of the threshold, and
roots are taken of candidates alone.
"""

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Floats, Ints, array, i32, u64
from tersegrad.kernels.cpu._candidates import HISTOGRAM, kth_largest
from tersegrad.kernels.cpu._intrinsics import WORD, hits, lowest
from tersegrad.kernels.cpu.spectrum import rows_of
from tersegrad.kernels.ops import BINS_AT_ONCE, ROOT_2, SQUARES, check_collect

__all__ = ["choose_bins", "collect_bins"]

Progress = NDArray[np.int64]

_ROOT_2 = np.float32(ROOT_2)
_SAFE = tuple(np.float32(end * end).view(np.int32) for end in SQUARES)
_ROOT_OF_LEAST = np.float32(2.0**-60).view(np.int32)  # below, squares of thresholds lose digits


def collect_bins(
    half: Tensor, place: int, k: int, progress: Tensor, positions: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Add the bins of a block that reach the key in ``progress`` to the candidates."""
    check_collect(half, k, progress, positions, keys, values)
    _collect(rows_of(half), place, k, array(progress, torch.int64), *_candidates(positions, keys, values))


def choose_bins(k: int, progress: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> int:
    """Move the k largest candidates to the front; returns k, their number if there are fewer, or -1."""
    return int(_choose(k, array(progress, torch.int64), *_candidates(positions, keys, values)))


def _candidates(positions: Tensor, keys: Tensor, values: Tensor) -> tuple[Ints, Ints, Floats]:
    return array(positions, torch.int32), array(keys, torch.int32), array(values)


@numba.njit(nogil=True, cache=True)
def _collect(half: Floats, place: int, k: int, progress: Progress, positions: Ints, keys: Ints, values: Floats) -> None:
    """Rows are read as one stream, some numbers at a time: loops over single rows would be too short to vectorise."""
    length = half.shape[1] // 2  # of a row: one more than its bins
    stream, size = half.reshape(-1), half.size // 2
    total, room, largest = progress[0], keys.size - BINS_AT_ONCE, i32(0)
    least, row = _square_of(np.int32(progress[1])), 0
    pairs, squares = np.zeros(2 * BINS_AT_ONCE, np.float32), np.zeros(BINS_AT_ONCE, np.float32)
    for start in range(0, size, BINS_AT_ONCE):
        stop = min(start + BINS_AT_ONCE, size)
        _square(stream[2 * start : 2 * stop], pairs, squares)
        for first in range(-(-start // length) * length, stop, length):  # of a row: it has both real numbers
            a, b, i = stream[2 * first], stream[2 * (first + length - 1)], first - start
            pairs[2 * i], pairs[2 * i + 1], squares[i] = a, b, a * a + b * b
        for last in range((start // length + 1) * length - 1, stop, length):
            squares[last - start] = np.float32(0)
        largest = max(largest, _largest(squares[: stop - start]))
        total, row = _append(pairs, squares, start, stop, length, least, place, row, total, positions, keys, values)
        if total > room:
            progress[1] = min(_keep_largest(k, positions, keys, values, total), INF_BITS) + 1
            total, least = k, _square_of(np.int32(progress[1]))
    progress[0] = total
    if not _SAFE[0] <= largest <= _SAFE[1] and (largest != 0 or np.any(half)):
        progress[2] += 1


@numba.njit(nogil=True, cache=True)
def _choose(k: int, progress: Progress, positions: Ints, keys: Ints, values: Floats) -> int:
    if progress[2] > 0:
        return -1
    if 0 < k <= progress[0]:
        _keep_largest(k, positions, keys, values, progress[0])
    return min(k, progress[0])


@numba.njit(nogil=True, cache=True)
def _square_of(low: np.int32) -> np.int32:
    """The bits of the smallest square whose root, rounded to float32, reaches a magnitude with these bits."""
    if low < _ROOT_OF_LEAST:
        return i32(0)  # passes some that do not reach it: they are candidates too many, no more
    if low >= INF_BITS:
        return i32(INF_BITS)
    bits = np.empty(2, np.int32)
    numbers = bits.view(np.float32)
    bits[0] = low
    numbers[1] = numbers[0] * numbers[0]
    while np.sqrt(numbers[1]) >= numbers[0]:
        bits[1] -= 1
    while np.sqrt(numbers[1]) < numbers[0]:
        bits[1] += 1
    return bits[1]


@numba.njit(nogil=True, cache=True)
def _square(part: Floats, pairs: Floats, squares: Floats) -> None:
    for i in range(part.size // 2):
        a, b = part[2 * i] * _ROOT_2, part[2 * i + 1] * _ROOT_2
        pairs[2 * i], pairs[2 * i + 1] = a, b
        squares[i] = a * a + b * b


@numba.njit(nogil=True, cache=True)
def _largest(squares: Floats) -> np.int32:
    patterns, largest = squares.view(np.int32), i32(0)
    for i in range(patterns.size):
        largest = max(largest, i32(patterns[i] & ABS_MASK))
    return largest


@numba.njit(nogil=True, cache=True)
def _append(
    pairs: Floats,
    squares: Floats,
    start: int,
    stop: int,
    length: int,
    least: np.int32,
    place: int,
    row: int,
    total: int,
    positions: Ints,
    keys: Ints,
    values: Floats,
) -> tuple[int, int]:
    """Add the bins whose square reaches ``least`` to the candidates; returns how many there are, and the last row.

    A word is compared at a time; of the last one only the bits of numbers count.
    """
    patterns, before = squares.view(np.int32), total
    last = (row + 1) * length - 1 - start  # of the row: no bin, but the second number of its first bin
    shift = place + start - row
    for first in range(0, stop - start, WORD):
        word = hits(patterns, first, least)
        if first + WORD > stop - start:
            word &= (u64(1) << u64(stop - start - first)) - u64(1)
        while word != 0:
            i = first + lowest(word)
            word &= word - u64(1)
            while i > last:
                last, shift, row = last + length, shift - 1, row + 1
            at = u64(total)
            positions[at], keys[at] = shift + i, patterns[u64(i)]
            values[at + at], values[at + at + u64(1)] = pairs[u64(2 * i)], pairs[u64(2 * i + 1)]
            total += int(i != last)
    roots = keys[before:total].view(np.float32)
    for i in range(roots.size):
        roots[i] = np.sqrt(roots[i])
    return total, row


@numba.njit(nogil=True, cache=True)
def _keep_largest(k: int, positions: Ints, keys: Ints, values: Floats, count: int) -> np.int32:
    """Move the k largest of ``count`` candidates to the front, in order; returns their smallest key."""
    kth, ties = kth_largest(k, keys, count, np.empty(HISTOGRAM, np.int64))
    kept = 0
    for i in range(count):  # no branch: which candidate stays is not predictable
        key = keys[i]
        tie = int(key == kth)
        positions[kept], keys[kept] = positions[i], key
        values[2 * kept], values[2 * kept + 1] = values[2 * i], values[2 * i + 1]
        kept += int(key > kth) | (tie & int(ties > 0))
        ties -= tie
    return kth
