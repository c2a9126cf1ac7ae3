"""Selecting the large elements of a float32 vector at the speed of memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.select``; here is only how.

Selections share one primitive, ``_hits``: 64 comparisons become one 64-bit word, and only the positions of
its set bits are looked at again. Comparing integer bits instead of floats costs the same, puts NaN and
infinity above all numbers, and does not depend on whether the thread flushes denormals.
"""

from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.reference.select import (
    check_indices,
    check_pairs,
    check_threshold,
    check_top_k,
    top_k_capacity,
)

__all__ = [
    "above",
    "abs_log_sum",
    "abs_sums",
    "all_finite",
    "gather",
    "scatter_add",
    "top_k",
    "top_k_capacity",
]

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Histogram = NDArray[np.int64]

ABS_MASK = np.int32(0x7FFFFFFF)  # everything but the sign
INF_BITS = np.int32(0x7F800000)  # |x| has these bits or more <=> x is infinite or NaN
BLOCK = 64  # elements compared at once: one bit each in a machine word
HISTOGRAM = 2048  # parts in which keys are counted
CHECK_EVERY = 4096  # elements between two chances to leave early


def all_finite(x: Tensor) -> bool:
    """Whether ``x`` holds neither NaN nor infinity: one pass that only reads."""
    return bool(_all_finite(_bits(x)))


def top_k(x: Tensor, k: int, indices: Tensor, candidates: Tensor) -> int:
    """Positions of the k largest ``|x|``, ascending, in ``indices[:k]``; returns k, or -1 if x is not finite.

    One pass collects the elements that reach a guessed threshold; the exact selection is among those few.
    A bad guess costs time, never exactness: when too many pass, the collection shrinks to the k largest so
    far and the threshold rises to theirs; when too few pass, a second pass starts from zero.
    """
    check_top_k(x, k, indices, candidates)
    if k == 0:
        return 0 if all_finite(x) else -1
    return int(_top_k(_bits(x), k, _array(indices, torch.int32), *_split_candidates(candidates, x.numel(), k)))


def _split_candidates(scratch: Tensor, n: int, k: int) -> tuple[Ints, Ints]:
    """Room for positions, and for their magnitude bits."""
    slots = top_k_capacity(n, k) // 2
    room = _array(scratch, torch.int32)
    return room[:slots], room[slots : 2 * slots]


def above(x: Tensor, threshold: float, indices: Tensor) -> int:
    """Positions of all ``|x| > threshold``, ascending, as far as ``indices`` reaches; returns the count."""
    return int(_above(_bits(x), _first_bits_above(threshold), _array(indices, torch.int32)))


def gather(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """``values[i] = x[indices[i]]``; IndexError if an index is out of range."""
    check_pairs(indices, values)
    if not _gather(_array(x), _array(indices, torch.int32), _array(values)):
        check_indices(indices, x.numel())


def scatter_add(acc: Tensor, indices: Tensor, values: Tensor, scale: float) -> bool:
    """``acc[indices[i]] += scale * values[i]``; IndexError before any write if an index is out of range.

    Returns whether all elements that it wrote are finite.
    """
    check_pairs(indices, values)
    largest = _scatter_add(_array(acc), _array(indices, torch.int32), _array(values), _float32(scale))
    if largest < 0:
        check_indices(indices, acc.numel())
    return bool(largest < INF_BITS)


def abs_sums(x: Tensor, threshold: float) -> tuple[int, float, float]:
    """``(count, sum |x|, sum x^2)`` over the elements with ``|x| > threshold``, in float64."""
    check_threshold(threshold)
    count, total, squares = _abs_sums(_array(x), _float32(threshold))
    return int(count), float(total), float(squares)


def abs_log_sum(x: Tensor) -> float:
    """Sum of ``ln |x|`` over the non-zero elements; each logarithm is exact to 1e-5."""
    return float(_abs_log_sum(_bits(x)))


# --- from tensors to arrays


def _array(tensor: Tensor, dtype: torch.dtype = torch.float32) -> NDArray[Any]:
    """The memory of a tensor, not a copy of it; the kernels trust what is checked here."""
    plain = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.dtype != dtype or not plain:
        seen = f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        raise TypeError(f"a CPU kernel takes contiguous 1-D {dtype} on cpu, got {seen}")
    if tensor.numel() > ABS_MASK:
        raise ValueError(f"positions are int32: a vector of {tensor.numel()} elements must be split")
    return tensor.detach().numpy()


def _bits(x: Tensor) -> Ints:
    return _array(x).view(np.int32)


def _float32(value: float) -> np.float32:
    """Rounded as torch does it: what is too large becomes infinity, without a warning."""
    with np.errstate(over="ignore"):
        return np.float32(value)


def _first_bits_above(threshold: float) -> np.int32:
    """The smallest magnitude bits that are above the threshold."""
    check_threshold(threshold)
    rounded = _float32(threshold)
    return np.int32(0) if rounded < 0 else np.int32(abs(rounded).view(np.int32) + 1)


# --- the block test, in LLVM's terms

_intrinsic: Any = numba.extending.intrinsic  # as Numba types it, callers would have to pass ``typing``


@_intrinsic
def _hits(typing: Any, bits: Any, start: Any, low: Any) -> Any:
    """A word whose bit j says whether ``bits[start + j] & ABS_MASK >= low``, for 0 <= j < 64.

    A loop that builds this word is vectorised badly; as one comparison of a 64-element vector it becomes
    compare, pack and move-mask instructions on AVX2, and mask registers on AVX-512.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(32), BLOCK)
        data = context.make_array(bits)(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        mask = ir.Constant(vector, [int(ABS_MASK)] * BLOCK)
        magnitudes = builder.and_(builder.load(address, align=4), mask)
        undefined = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(undefined, args[2], ir.Constant(ir.IntType(32), 0))
        lows = builder.shuffle_vector(one, undefined, ir.Constant(vector, [0] * BLOCK))
        return builder.bitcast(builder.icmp_signed(">=", magnitudes, lows), ir.IntType(BLOCK))

    return types.uint64(bits, types.intp, types.int32), generate


@_intrinsic
def _lowest(typing: Any, word: Any) -> Any:
    """The number of the lowest set bit of a word that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.intp(types.uint64), generate


@_intrinsic
def _bits_of(typing: Any, number: Any) -> Any:
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


# --- kernels; ``np.int32(...)`` keeps Numba from widening int32 arithmetic, which would halve the vectors


@numba.njit(nogil=True, cache=True)
def _all_finite(bits: Ints) -> bool:
    for start in range(0, bits.size, CHECK_EVERY):
        part = bits[start : start + CHECK_EVERY]  # counted from its own start, this becomes vectors: 2.4x faster
        largest = np.int32(0)
        for i in range(part.size):
            largest = max(largest, np.int32(part[i] & ABS_MASK))
        if largest >= INF_BITS:
            return False
    return True


@numba.njit(nogil=True, cache=True)
def _above(bits: Ints, low: np.int32, indices: Ints) -> int:
    n, capacity, count = bits.size, indices.size, 0
    for start in range(0, n - n % BLOCK, BLOCK):
        word = _hits(bits, start, low)
        while word != 0:
            if count < capacity:
                indices[count] = start + _lowest(word)
            count += 1
            word &= word - np.uint64(1)
    for i in range(n - n % BLOCK, n):
        if np.int32(bits[i] & ABS_MASK) >= low:
            if count < capacity:
                indices[count] = i
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def _top_k(bits: Ints, k: int, indices: Ints, positions: Ints, keys: Ints) -> int:
    histogram = np.empty(HISTOGRAM, np.int64)
    width = _sample_width(bits.size, k, keys.size)
    if width > 0:
        for i in range(bits.size // width):
            keys[i] = bits[_place_drawn(i, width)] & ABS_MASK
    count = _collect(bits, k, _guess(bits.size, k, width, keys, histogram), positions, keys, histogram)
    return _choose(bits, k, indices, positions, keys, count, histogram)


@numba.njit(nogil=True, cache=True)
def _choose(bits: Ints, k: int, indices: Ints, positions: Ints, keys: Ints, count: int, histogram: Histogram) -> int:
    """The k largest of ``count`` candidates; k, or -1 if one is not finite."""
    if count < k:  # the guess was too high: rare, and costs one more pass
        count = _collect(bits, k, np.int32(0), positions, keys, histogram)
    _keep_largest(k, positions, keys, count, histogram)
    # Whatever is not finite has larger bits than all numbers, so it has never been dropped for one.
    for i in range(k):
        if keys[i] >= INF_BITS:
            return -1
    for i in range(k):
        indices[i] = positions[i]
    return k


@numba.njit(nogil=True, cache=True)
def _sample_width(n: int, k: int, room: int) -> int:
    """One element is drawn from each stretch of so many; 0 if the vector is too short to guess.

    About r = k / width of the k largest are then in the sample, give or take sqrt(r). Each draw is a cache miss, and
    r = 256 gives a guess that is sharp enough.
    """
    width = max(256, k // 256, n // room + 1)
    return 0 if n <= room or _sample_rank(k, width) > n // width else width


@numba.njit(nogil=True, cache=True)
def _sample_rank(k: int, width: int) -> int:
    return int(k / width + 3.0 * np.sqrt(k / width)) + 3


@numba.njit(nogil=True, cache=True, forceinline=True)
def _place_drawn(i: int, width: int) -> Any:
    """Where in the i-th stretch: weights have periods (rows, channels) that a fixed stride would hit or miss."""
    hashed = np.uint64(i) * np.uint64(0x9E3779B97F4A7C15)
    hashed = (hashed ^ (hashed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.uint64(i * width) + (((hashed >> np.uint64(32)) * np.uint64(width)) >> np.uint64(32))


@numba.njit(nogil=True, cache=True)
def _guess(n: int, k: int, width: int, sample: Ints, histogram: Histogram) -> np.int32:
    """Magnitude bits that somewhat more than k of n elements reach, most likely; 0 if there is no sample.

    With r of the k largest in the sample, it is the sample's element of rank r + 3 sqrt(r) + 3.
    """
    if width == 0:
        return np.int32(0)
    low, _ = _kth_largest(_sample_rank(k, width), sample, n // width, histogram)
    return np.int32(min(low, INF_BITS))


@numba.njit(nogil=True, cache=True)
def _collect(bits: Ints, k: int, low: np.int32, positions: Ints, keys: Ints, histogram: Histogram) -> int:
    """Position and magnitude bits of all elements that reach ``low`` and are not yet beaten by k others."""
    n, room, count = bits.size, keys.size - BLOCK, 0
    for start in range(0, n - n % BLOCK, BLOCK):
        word = _hits(bits, start, low)
        while word != 0:
            i = start + _lowest(word)
            positions[count] = i
            keys[count] = bits[i] & ABS_MASK
            count += 1
            word &= word - np.uint64(1)
        if count > room:
            count, low = k, _raised(k, positions, keys, count, histogram)
            if low > INF_BITS:
                return count
    for i in range(n - n % BLOCK, n):
        key = np.int32(bits[i] & ABS_MASK)
        if key >= low:
            positions[count] = i
            keys[count] = key
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def _raised(k: int, positions: Ints, keys: Ints, count: int, histogram: Histogram) -> np.int32:
    """Keeps the k largest candidates, in front; returns the magnitude bits that one further on must reach to beat them.

    An equal one comes too late: the lowest positions win. Above ``INF_BITS`` the answer is known, and NaN would go on
    passing.
    """
    return np.int32(min(_keep_largest(k, positions, keys, count, histogram), INF_BITS) + 1)


@numba.njit(nogil=True, cache=True)
def _keep_largest(k: int, positions: Ints, keys: Ints, count: int, histogram: Histogram) -> np.int32:
    """Move the k largest of ``count`` candidates to the front, in order; returns their smallest key."""
    kth, ties = _kth_largest(k, keys, count, histogram)
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
def _kth_largest(k: int, keys: Ints, count: int, histogram: Histogram) -> tuple[np.int32, int]:
    """The k-th largest of ``keys[:count]``, and how many of those equal to it are among the k largest.

    Of an interval that holds it, count the keys in up to 2048 equal parts and go on with the right part:
    three rounds for 31 bits, fewer when the keys are close to each other.
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
    return low, k


@numba.njit(nogil=True, cache=True)
def _in_range(indices: Ints, n: int) -> bool:
    largest = np.uint32(0)  # seen as unsigned, a negative index is a huge one
    for i in range(indices.size):
        largest = max(largest, np.uint32(indices[i]))
    return indices.size == 0 or bool(largest < n)


@numba.njit(nogil=True, cache=True)
def _gather(x: Floats, indices: Ints, values: Floats) -> bool:
    if not _in_range(indices, x.size):
        return False
    for i in range(indices.size):
        values[i] = x[np.uint32(indices[i])]
    return True


@numba.njit(nogil=True, cache=True)
def _scatter_add(acc: Floats, indices: Ints, values: Floats, scale: np.float32) -> np.int32:
    """The largest magnitude bits that it wrote; -1, and nothing is written, if an index is out of range."""
    if not _in_range(indices, acc.size):
        return np.int32(-1)
    largest = np.int32(0)
    for i in range(indices.size):
        total = acc[np.uint32(indices[i])] + scale * values[i]
        acc[np.uint32(indices[i])] = total
        largest = max(largest, np.int32(_bits_of(total) & ABS_MASK))
    return largest


# --- sums; reordering them is what lets them be vectors, and neither flag touches NaN or infinity


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


# error_model: Python's would test every divisor for zero, and a test is no vector
@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"}, error_model="numpy")
def _abs_log_sum(bits: Ints) -> float:
    """ln(2^e m) = e ln 2 + ln m, with ln m = 2 (t + t^3/3 + t^5/5 + ...) at t = (m - 1)/(m + 1), at most 1/3.

    The bits of |x|, read as an integer and divided by 2^23, are e + 127 + (m - 1). Five terms leave 2 t^11/11 < 1.1e-6,
    and rounding that quotient to float32 leaves 1e-5. A call to ``log`` would be the only thing here that is no vector.
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
