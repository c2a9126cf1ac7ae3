"""Sums, counts and tests over a whole vector at memory bandwidth (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.moments``.
"""

import numba
import numpy as np
from torch import Tensor

from tersegrad.kernels.cpu._arrays import (
    ABS_MASK,
    INF_BITS,
    Floats,
    Ints,
    array,
    first_bits_above,
    float32,
    i32,
    patterns,
)
from tersegrad.kernels.ops import Moments, check_threshold, float_of

__all__ = ["abs_log_sum", "abs_max", "abs_sums", "all_finite", "count_above", "moments"]

CHECK_EVERY = 4096  # elements between two checks whether to return early


def all_finite(x: Tensor) -> bool:
    """Whether ``x`` contains neither NaN nor infinity: one pass that only reads."""
    return bool(_all_finite(patterns(x)))


def abs_max(x: Tensor) -> float:
    """The largest ``|x|``, 0 if there is none; infinite or NaN if and only if an element of ``x`` is."""
    return float_of(int(_abs_max(patterns(x))))


def moments(x: Tensor) -> Moments:
    """Sums of x, of ``|x|`` and of x^2 in float64, in one pass."""
    return Moments(*map(float, _moments(array(x))))


def count_above(x: Tensor, threshold: float) -> int:
    """How many elements have ``|x| > threshold``: one pass that only reads."""
    return int(_count_above(patterns(x), first_bits_above(threshold)))


def abs_sums(x: Tensor, threshold: float) -> tuple[int, float, float]:
    """``(count, sum |x|, sum x^2)`` over the elements with ``|x| > threshold``, in float64."""
    check_threshold(threshold)
    count, total, squares = _abs_sums(array(x), float32(threshold))
    return int(count), float(total), float(squares)


def abs_log_sum(x: Tensor) -> float:
    """Sum of ``ln |x|`` over the non-zero elements; each logarithm is exact to 1e-5."""
    return float(_abs_log_sum(patterns(x)))


@numba.njit(nogil=True, cache=True)
def _all_finite(bits: Ints) -> bool:
    for start in range(0, bits.size, CHECK_EVERY):
        part = bits[start : start + CHECK_EVERY]  # indexed from its own start, this loop is vectorised: 2.4x faster
        largest = np.int32(0)
        for i in range(part.size):
            largest = max(largest, np.int32(part[i] & ABS_MASK))
        if largest >= INF_BITS:
            return False
    return True


@numba.njit(nogil=True, cache=True)
def _abs_max(bits: Ints) -> np.int32:
    largest = i32(0)
    for i in range(bits.size):
        largest = max(largest, i32(bits[i] & ABS_MASK))
    return largest


@numba.njit(nogil=True, cache=True)
def _count_above(bits: Ints, low: np.int32) -> np.int32:
    count = np.int32(0)  # enough for 2^31 elements; a wider counter would halve the SIMD lanes
    for i in range(bits.size):
        count = np.int32(count + np.int32(np.int32(bits[i] & ABS_MASK) >= low))
    return count


# --- sums; they are vectorised only if they may be reordered, and neither flag affects NaN or infinity


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _moments(x: Floats) -> tuple[float, float, float]:
    total, abs_total, squares = 0.0, 0.0, 0.0
    for i in range(x.size):
        value = np.float64(x[i])
        total += value
        abs_total += abs(value)
        squares += value * value
    return total, abs_total, squares


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _abs_sums(x: Floats, threshold: np.float32) -> tuple[np.int32, float, float]:
    count, total, squares = np.int32(0), 0.0, 0.0
    for i in range(x.size):
        magnitude = abs(x[i])
        large = not magnitude <= threshold  # true for NaN
        value = np.float64(magnitude if large else np.float32(0))
        count = np.int32(count + np.int32(large))
        total += value
        squares += value * value
    return count, total, squares


# error_model: Python's would check every divisor for zero, which prevents vectorisation
@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"}, error_model="numpy")
def _abs_log_sum(bits: Ints) -> float:
    """ln(2^e m) = e ln 2 + ln m, with ln m = 2 (t + t^3/3 + t^5/5 + ...) at t = (m - 1)/(m + 1), at most 1/3.

    The bits of |x|, read as an integer and divided by 2^23, are e + 127 + (m - 1). Five terms leave 2 t^11/11 < 1.1e-6,
    and rounding that quotient to float32 leaves 1e-5. A call to ``log`` would prevent vectorisation.
    """
    total = 0.0
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & ABS_MASK)
        quotient = max(np.float32(magnitude) * np.float32(2.0**-23), np.float32(1))
        whole = np.floor(quotient)
        fraction = quotient - whole
        t = fraction / (fraction + np.float32(2))
        t2 = t * t
        series = np.float32(1 / 9) * t2 + np.float32(1 / 7)
        series = series * t2 + np.float32(1 / 5)
        series = series * t2 + np.float32(1 / 3)
        series = series * t2 + np.float32(1)
        logarithm = (whole - np.float32(127)) * np.float32(0.6931472) + np.float32(2) * t * series
        total += np.float64(logarithm if magnitude != 0 else np.float32(0))
    return total
