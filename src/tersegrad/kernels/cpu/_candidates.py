"""Exact selection of the k largest among candidates, and a threshold guess that keeps the candidates few.

A bad guess costs time, never exactness: when too many elements pass, the candidates shrink to the k largest so far and
the threshold rises to theirs; when too few pass, a second pass starts from zero.
"""

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Ints, array
from tersegrad.kernels.cpu._intrinsics import WORD, hits, lowest
from tersegrad.kernels.ops import top_k_capacity

Histogram = NDArray[np.int64]

HISTOGRAM = 2048  # bins in which keys are counted


def split_candidates(scratch: Tensor, n: int, k: int) -> tuple[Ints, Ints]:
    """Buffers for positions, and for their magnitude bits."""
    slots = top_k_capacity(n, k) // 2
    buffer = array(scratch, torch.int32)
    return buffer[:slots], buffer[slots : 2 * slots]


@numba.njit(nogil=True, cache=True)
def choose(bits: Ints, k: int, indices: Ints, positions: Ints, keys: Ints, count: int, histogram: Histogram) -> int:
    """Write the positions of the k largest of ``count`` candidates; return k, or -1 if one is non-finite."""
    if count < k:  # the guess was too high: rare, and costs one more pass
        count = collect(bits, k, np.int32(0), positions, keys, histogram)
    keep_largest(k, positions, keys, count, histogram)
    # Non-finite elements have larger bits than all finite ones, so none has been dropped.
    for i in range(k):
        if keys[i] >= INF_BITS:
            return -1
    for i in range(k):
        indices[i] = positions[i]
    return k


@numba.njit(nogil=True, cache=True)
def sample_width(n: int, k: int, capacity: int) -> int:
    """Length of the slices from each of which one element is sampled; 0 if the vector is too short to guess.

    The sample then holds about r = k / width of the k largest, with a standard deviation of sqrt(r). Each draw is a
    cache miss, and r = 256 gives a guess that is sharp enough.
    """
    width = max(256, k // 256, n // capacity + 1)
    return 0 if n <= capacity or sample_rank(k, width) > n // width else width


@numba.njit(nogil=True, cache=True)
def sample_rank(k: int, width: int) -> int:
    return int(k / width + 3.0 * np.sqrt(k / width)) + 3


@numba.njit(nogil=True, cache=True, forceinline=True)
def place_drawn(i: int, width: int) -> Any:
    """The position sampled in the i-th slice; random, as a fixed stride would resonate with rows and channels."""
    hashed = np.uint64(i) * np.uint64(0x9E3779B97F4A7C15)
    hashed = (hashed ^ (hashed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.uint64(i * width) + (((hashed >> np.uint64(32)) * np.uint64(width)) >> np.uint64(32))


@numba.njit(nogil=True, cache=True)
def guess(n: int, k: int, width: int, sample: Ints, histogram: Histogram) -> np.int32:
    """Magnitude bits that probably somewhat more than k of n elements reach; 0 if there is no sample.

    With r of the k largest in the sample, it is the sample's element of rank r + 3 sqrt(r) + 3.
    """
    if width == 0:
        return np.int32(0)
    low, _ = kth_largest(sample_rank(k, width), sample, n // width, histogram)
    return np.int32(min(low, INF_BITS))


@numba.njit(nogil=True, cache=True)
def collect(bits: Ints, k: int, low: np.int32, positions: Ints, keys: Ints, histogram: Histogram) -> int:
    """Positions and magnitude bits of all elements that reach ``low`` and are among the k largest so far."""
    n, capacity, count = bits.size, keys.size - WORD, 0
    for start in range(0, n - n % WORD, WORD):
        word = hits(bits, start, low)
        while word != 0:
            i = start + lowest(word)
            positions[count] = i
            keys[count] = bits[i] & ABS_MASK
            count += 1
            word &= word - np.uint64(1)
        if count > capacity:
            count, low = k, raised(k, positions, keys, count, histogram)
            if low > INF_BITS:
                return count
    for i in range(n - n % WORD, n):
        key = np.int32(bits[i] & ABS_MASK)
        if key >= low:
            positions[count] = i
            keys[count] = key
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def raised(k: int, positions: Ints, keys: Ints, count: int, histogram: Histogram) -> np.int32:
    """Move the k largest candidates to the front; return the magnitude bits that a later element needs to beat them.

    Among equals the lowest position wins, so a later element must be larger. A result above ``INF_BITS`` means that the
    vector holds a non-finite element.
    """
    return np.int32(min(keep_largest(k, positions, keys, count, histogram), INF_BITS) + 1)


@numba.njit(nogil=True, cache=True)
def keep_largest(k: int, positions: Ints, keys: Ints, count: int, histogram: Histogram) -> np.int32:
    """Move the k largest of ``count`` candidates to the front, in order; returns their smallest key."""
    kth, ties = kth_largest(k, keys, count, histogram)
    kept = 0
    for i in range(count):  # no branch: which candidate stays is not predictable
        key = keys[i]
        tie = int(key == kth)
        positions[kept] = positions[i]
        keys[kept] = key
        kept += int(key > kth) | (tie & int(ties > 0))
        ties -= tie
    return kth


@numba.njit(nogil=True, cache=True)
def kth_largest(k: int, keys: Ints, count: int, histogram: Histogram) -> tuple[np.int32, int]:
    """The k-th largest of ``keys[:count]``, and how many of those equal to it are among the k largest.

    Split an interval that contains it into up to 2048 equal bins, count the keys in each, and go on with the bin that
    contains it: three rounds for 31 bits, fewer when the keys are close to each other.
    """
    low, high = keys[0], keys[0]
    for i in range(count):
        low, high = min(low, keys[i]), max(high, keys[i])
    while low < high:
        span, shift = np.int64(high) - low, 0
        while span >> shift >= histogram.size:
            shift += 1
        histogram[:] = 0
        for i in range(count):
            offset = np.int64(keys[i]) - low
            if np.uint64(offset) <= np.uint64(span):  # 0 <= offset <= span, in one comparison
                histogram[offset >> shift] += 1
        part = span >> shift
        while histogram[part] < k:
            k -= histogram[part]
            part -= 1
        low = np.int32(low + (part << shift))
        high = np.int32(min(high, low + (1 << shift) - 1))
        if low < high and 4 * histogram[part] < count:
            keys, count = within(low, high, keys, count, histogram[part])
    return low, k


@numba.njit(nogil=True, cache=True)
def within(low: np.int32, high: np.int32, keys: Ints, count: int, size: int) -> tuple[Ints, int]:
    """A copy of the keys in an interval, of which there are ``size``: further rounds need not read the others."""
    found, kept = np.empty(size + 1, np.int32), 0
    for i in range(count):  # no branch: which keys are in it is not predictable
        found[kept] = keys[i]
        kept += int(low <= keys[i] <= high)
    return found, size
