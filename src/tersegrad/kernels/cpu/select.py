"""Selecting the large elements of a float32 vector at memory bandwidth (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.select``.

Selections share one primitive, ``hits``: 64 comparisons become one 64-bit word, and only the elements of its set bits
are read again. Comparing integer bits instead of floats costs the same, puts NaN and infinity above all finite numbers,
and does not depend on whether the thread flushes denormals.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, Ints, array, first_bits_above, patterns
from tersegrad.kernels.cpu._candidates import (
    HISTOGRAM,
    choose,
    collect,
    guess,
    place_drawn,
    sample_width,
    split_candidates,
)
from tersegrad.kernels.cpu._intrinsics import WORD, hits, lowest
from tersegrad.kernels.cpu.moments import all_finite
from tersegrad.kernels.ops import check_top_k, top_k_capacity

__all__ = ["above", "top_k", "top_k_capacity"]


def top_k(x: Tensor, k: int, indices: Tensor, candidates: Tensor) -> int:
    """Positions of the k largest ``|x|``, ascending, in ``indices[:k]``; returns k, or -1 if x is non-finite.

    One pass collects the elements that reach a guessed threshold; the exact selection is among those few.
    """
    check_top_k(x, k, indices, candidates)
    if k == 0:
        return 0 if all_finite(x) else -1
    buffers = split_candidates(candidates, x.numel(), k)
    return int(_top_k(patterns(x), k, array(indices, torch.int32), *buffers))


def above(x: Tensor, threshold: float, indices: Tensor) -> int:
    """Positions of all ``|x| > threshold``, ascending, as far as ``indices`` reaches; returns the count."""
    return int(_above(patterns(x), first_bits_above(threshold), array(indices, torch.int32)))


@numba.njit(nogil=True, cache=True)
def _above(bits: Ints, low: np.int32, indices: Ints) -> int:
    n, capacity, count = bits.size, indices.size, 0
    for start in range(0, n - n % WORD, WORD):
        word = hits(bits, start, low)
        while word != 0:
            if count < capacity:
                indices[count] = start + lowest(word)
            count += 1
            word &= word - np.uint64(1)
    for i in range(n - n % WORD, n):
        if np.int32(bits[i] & ABS_MASK) >= low:
            if count < capacity:
                indices[count] = i
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def _top_k(bits: Ints, k: int, indices: Ints, positions: Ints, keys: Ints) -> int:
    histogram = np.empty(HISTOGRAM, np.int64)
    width = sample_width(bits.size, k, keys.size)
    if width > 0:
        for i in range(bits.size // width):
            keys[i] = bits[place_drawn(i, width)] & ABS_MASK
    count = collect(bits, k, guess(bits.size, k, width, keys, histogram), positions, keys, histogram)
    return choose(bits, k, indices, positions, keys, count, histogram)
