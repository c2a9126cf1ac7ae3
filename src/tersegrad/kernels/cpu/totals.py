"""Sums and counts over a whole vector at the speed of memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.totals``; here is only how.
"""

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu.select import _array, _bits, _first_bits_above
from tersegrad.kernels.reference.totals import Moments

__all__ = ["count_above", "moments"]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

ABS_MASK = np.int32(0x7FFFFFFF)  # everything but the sign


def moments(x: Tensor) -> Moments:
    """Sums of x, of ``|x|`` and of x^2 in float64, in one pass."""
    return Moments(*map(float, _moments(_array(x))))


def count_above(x: Tensor, threshold: float) -> int:
    """How many elements have ``|x| > threshold``: one pass that only reads."""
    return int(_count_above(_bits(x), _first_bits_above(threshold)))


# Reordering the sums is what lets them be vectors, and neither flag touches NaN or infinity.
@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _moments(x: Floats) -> tuple[float, float, float]:
    total, abs_total, squares = 0.0, 0.0, 0.0
    for i in range(x.size):
        value = np.float64(x[i])
        total += value
        abs_total += abs(value)
        squares += value * value
    return total, abs_total, squares


@numba.njit(nogil=True, cache=True)
def _count_above(bits: Ints, low: np.int32) -> np.int32:
    count = np.int32(0)  # a vector has fewer than 2^31 elements; wider counters would halve the vectors
    for i in range(bits.size):
        count = np.int32(count + np.int32(np.int32(bits[i] & ABS_MASK) >= low))
    return count
