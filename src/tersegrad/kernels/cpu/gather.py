"""Reading and adding to single elements of a vector (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.gather``.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Floats, Ints, array, float32
from tersegrad.kernels.cpu._bounds import in_range
from tersegrad.kernels.cpu._intrinsics import pattern_of
from tersegrad.kernels.ops import check_indices, check_pairs

__all__ = ["gather", "scatter_add"]


def gather(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """``values[i] = x[indices[i]]``; IndexError if an index is out of range."""
    check_pairs(indices, values)
    if not _gather(array(x), array(indices, torch.int32), array(values)):
        check_indices(indices, x.numel())


def scatter_add(acc: Tensor, indices: Tensor, values: Tensor, scale: float) -> bool:
    """``acc[indices[i]] += scale * values[i]``; IndexError before any write if an index is out of range.

    Returns whether all elements that it wrote are finite.
    """
    check_pairs(indices, values)
    largest = _scatter_add(array(acc), array(indices, torch.int32), array(values), float32(scale))
    if largest < 0:
        check_indices(indices, acc.numel())
    return bool(largest < INF_BITS)


@numba.njit(nogil=True, cache=True)
def _gather(x: Floats, indices: Ints, values: Floats) -> bool:
    if not in_range(indices, x.size):
        return False
    for i in range(indices.size):
        values[i] = x[np.uint32(indices[i])]
    return True


@numba.njit(nogil=True, cache=True)
def _scatter_add(acc: Floats, indices: Ints, values: Floats, scale: np.float32) -> np.int32:
    """The largest magnitude bits that were written; -1, and nothing is written, if an index is out of range."""
    if not in_range(indices, acc.size):
        return np.int32(-1)
    largest = np.int32(0)
    for i in range(indices.size):
        total = acc[np.uint32(indices[i])] + scale * values[i]
        acc[np.uint32(indices[i])] = total
        largest = max(largest, np.int32(pattern_of(total) & ABS_MASK))
    return largest
