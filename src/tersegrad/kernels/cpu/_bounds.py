"""Bounds check of indices."""

import numba
import numpy as np

from tersegrad.kernels.cpu._arrays import Ints


@numba.njit(nogil=True, cache=True)
def in_range(indices: Ints, n: int) -> bool:
    largest = np.uint32(0)  # as unsigned, a negative index is a huge one
    for i in range(indices.size):
        largest = max(largest, np.uint32(indices[i]))
    return indices.size == 0 or bool(largest < n)
