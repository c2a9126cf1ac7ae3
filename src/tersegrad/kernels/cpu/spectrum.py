"""Half spectra as pairs of numbers, at memory bandwidth (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.spectrum``.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Floats, Ints, array, float32
from tersegrad.kernels.cpu._bounds import in_range
from tersegrad.kernels.ops import ROOT_2, ROOT_HALF, check_fold, check_indices, check_pair_indices

__all__ = ["fold", "gather_pairs", "scatter_add_pairs", "unfold"]

_ROOT_2, _ROOT_HALF = np.float32(ROOT_2), np.float32(ROOT_HALF)


def fold(half: Tensor, bins: Tensor, magnitudes: Tensor) -> None:
    """Half spectra to bins and magnitudes, in one pass."""
    check_fold(half, bins, magnitudes)
    pieces, count = half.shape[0], half.shape[1] - 1
    _fold(rows_of(half), array(bins).reshape(pieces, 2 * count), array(magnitudes).reshape(pieces, count))


def unfold(bins: Tensor, half: Tensor) -> None:
    """Bins back to half spectra."""
    check_fold(half, bins)
    _unfold(array(bins).reshape(half.shape[0], 2 * half.shape[1] - 2), rows_of(half))


def gather_pairs(pairs: Tensor, indices: Tensor, values: Tensor) -> None:
    """``values[2i], values[2i + 1] = `` pair number ``indices[i]``; IndexError if there is no such pair."""
    check_pair_indices(pairs, indices, values)
    if not _gather_pairs(array(pairs), array(indices, torch.int32), array(values)):
        check_indices(indices, pairs.numel() // 2)


def scatter_add_pairs(acc: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale`` times a pair of values to each of these pairs; IndexError before any write."""
    check_pair_indices(acc, indices, values)
    if not _scatter_add_pairs(array(acc), array(indices, torch.int32), array(values), float32(scale)):
        check_indices(indices, acc.numel() // 2)


def rows_of(half: Tensor) -> Floats:
    """The memory of complex rows, with real and imaginary parts interleaved."""
    if not half.is_contiguous():
        raise TypeError(f"half spectra must be contiguous; strides are {half.stride()}")
    return array(torch.view_as_real(half).view(-1)).reshape(half.shape[0], 2 * half.shape[1])


# Rows are indexed as rows: an offset added to the index would be checked for its sign, which prevents vectorisation.


@numba.njit(nogil=True, cache=True)
def _fold(half: Floats, bins: Floats, magnitudes: Floats) -> None:
    pieces, count = magnitudes.shape
    for row in range(pieces):
        for i in range(count):
            a, b = half[row, 2 * i] * _ROOT_2, half[row, 2 * i + 1] * _ROOT_2
            bins[row, 2 * i], bins[row, 2 * i + 1] = a, b
            magnitudes[row, i] = np.sqrt(a * a + b * b)
        a, b = half[row, 0], half[row, 2 * count]
        bins[row, 0], bins[row, 1] = a, b
        magnitudes[row, 0] = np.sqrt(a * a + b * b)


@numba.njit(nogil=True, cache=True)
def _unfold(bins: Floats, half: Floats) -> None:
    pieces, length = bins.shape
    for row in range(pieces):
        for i in range(length):
            half[row, i] = bins[row, i] * _ROOT_HALF
        half[row, 0], half[row, 1] = bins[row, 0], np.float32(0)
        half[row, length], half[row, length + 1] = bins[row, 1], np.float32(0)


@numba.njit(nogil=True, cache=True)
def _gather_pairs(pairs: Floats, indices: Ints, values: Floats) -> bool:
    if not in_range(indices, pairs.size // 2):
        return False
    for i in range(indices.size):
        place = 2 * np.uint64(np.uint32(indices[i]))
        values[2 * i], values[2 * i + 1] = pairs[place], pairs[place + 1]
    return True


@numba.njit(nogil=True, cache=True)
def _scatter_add_pairs(acc: Floats, indices: Ints, values: Floats, scale: np.float32) -> bool:
    if not in_range(indices, acc.size // 2):
        return False
    for i in range(indices.size):
        place = 2 * np.uint64(np.uint32(indices[i]))
        acc[place] += scale * values[2 * i]
        acc[place + 1] += scale * values[2 * i + 1]
    return True
