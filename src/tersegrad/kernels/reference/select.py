"""Selecting the large elements of a float32 vector, in plain torch: the definition fast kernels must meet.

Magnitudes are ordered by the integer ``bits(x) & 0x7fffffff``. On finite numbers that is the order of ``|x|``
(so -0.0 equals 0.0); above them come infinity and then NaN, which therefore never hide below a threshold.
"""

import math

import torch
from torch import Tensor

ABS_MASK = 0x7FFFFFFF  # everything but the sign
INF_BITS = 0x7F800000  # |x| has these bits or more <=> x is infinite or NaN


def all_finite(x: Tensor) -> bool:
    """Whether ``x`` holds neither NaN nor infinity.

    >>> all_finite(torch.tensor([1.0, -2.0])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    return bool((_magnitude_bits(x) < INF_BITS).all())


def top_k_capacity(n: int, k: int) -> int:
    """How many int32 elements of scratch ``top_k`` needs: about 3 k + 16384, and never more than 2 n + 128.

    >>> top_k_capacity(1_000_000, 1000)
    19512
    """
    check_k(n, k)
    return 2 * (min(n, k + k // 2 + 8192) + 64)


def top_k(x: Tensor, k: int, indices: Tensor, candidates: Tensor) -> int:
    """Write the positions of the k largest ``|x|`` to ``indices[:k]``, in ascending order of position.

    Among equal magnitudes the lowest positions win. Returns k; or -1, and leaves ``indices`` alone, if any
    element of ``x`` is not finite. ``candidates`` is int32 scratch of ``top_k_capacity(len(x), k)`` elements.

    >>> indices = torch.empty(2, dtype=torch.int32)
    >>> candidates = torch.empty(top_k_capacity(4, 2), dtype=torch.int32)
    >>> top_k(torch.tensor([1.0, -3.0, 2.0, 2.0]), 2, indices, candidates), indices.tolist()
    (2, [1, 2])
    """
    check_top_k(x, k, indices, candidates)
    if not all_finite(x):
        return -1
    largest_first = torch.argsort(_magnitude_bits(x), descending=True, stable=True)
    indices[:k] = largest_first[:k].sort().values
    return k


def above(x: Tensor, threshold: float, indices: Tensor) -> int:
    """Write the positions of all elements with ``|x| > threshold``, ascending, as far as ``indices`` reaches.

    Returns how many there are, even when ``indices`` is too short for them. The threshold is rounded to
    float32. NaN counts as above every threshold, so that a broken gradient shows in what is selected from it.

    >>> indices = torch.full((3,), -1, dtype=torch.int32)
    >>> above(torch.tensor([1.0, -3.0, 2.0]), 1.0, indices), indices.tolist()
    (2, [1, 2, -1])
    """
    found = _is_above(x, threshold).nonzero().flatten()
    written = min(found.numel(), indices.numel())
    indices[:written] = found[:written]
    return found.numel()


def gather(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """``values[i] = x[indices[i]]``; IndexError if an index is not in [0, len(x))."""
    check_pairs(indices, values)
    check_indices(indices, x.numel())
    torch.index_select(x, 0, indices, out=values)


def scatter_add(acc: Tensor, indices: Tensor, values: Tensor, scale: float) -> bool:
    """``acc[indices[i]] += scale * values[i]``, the product rounded to float32 before it is added.

    All indices are checked before anything is written; IndexError if one is not in [0, len(acc)). Returns whether all
    elements that it wrote are finite.

    >>> acc = torch.zeros(3)
    >>> scatter_add(acc, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1.0, 2.0]), 0.5), acc.tolist()
    (True, [0.5, 0.0, 1.0])
    """
    check_pairs(indices, values)
    check_indices(indices, acc.numel())
    acc.index_add_(0, indices, values * torch.tensor(scale, dtype=torch.float32))
    return all_finite(acc[indices])


def abs_sums(x: Tensor, threshold: float) -> tuple[int, float, float]:
    """``(count, sum |x|, sum x^2)`` over the elements with ``|x| > threshold``, accumulated in float64.

    The count is that of ``above``; a negative threshold takes every element. NaN counts as above every
    threshold, so with a finite one both sums are finite if and only if all elements are.

    >>> abs_sums(torch.tensor([1.0, -3.0, 2.0]), 1.0)
    (2, 5.0, 13.0)
    """
    large = x[_is_above(x, threshold)].abs().double()
    return large.numel(), large.sum().item(), large.square().sum().item()


def abs_log_sum(x: Tensor) -> float:
    """Sum of ``ln |x|`` over the non-zero elements, accumulated in float64; denormals count as the least normal number.

    >>> abs_log_sum(torch.tensor([math.e, 0.0, -1.0]))  # doctest: +ELLIPSIS
    0.99999...
    """
    large = x[x != 0].abs().double().clamp(min=2.0**-126)
    return large.log().sum().item()


def check_k(n: int, k: int) -> None:
    """Raise ValueError unless k elements can be chosen from n."""
    if not 0 <= k <= n:
        raise ValueError(f"cannot select the {k} largest of {n} elements: k must be between 0 and {n}")


def check_top_k(x: Tensor, k: int, indices: Tensor, candidates: Tensor) -> None:
    """Raise ValueError unless ``indices`` and ``candidates`` are long enough."""
    if indices.numel() < k:
        raise ValueError(f"indices holds {indices.numel()} elements, k = {k} are to be written")
    needed = top_k_capacity(x.numel(), k)
    if candidates.numel() < needed:
        raise ValueError(f"candidates holds {candidates.numel()} elements, top_k_capacity asks for {needed}")


def check_threshold(threshold: float) -> None:
    """Raise ValueError if the threshold is NaN, which nothing is above or below."""
    if math.isnan(threshold):
        raise ValueError("threshold is NaN: the statistics it was made from are not finite")


def check_pairs(indices: Tensor, values: Tensor) -> None:
    """Raise ValueError unless there is one value for each index."""
    if indices.numel() != values.numel():
        raise ValueError(f"{indices.numel()} indices but {values.numel()} values: there must be one for each")


def check_indices(indices: Tensor, n: int) -> None:
    """Raise IndexError unless every index is in [0, n)."""
    if indices.numel() == 0:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= n:
        raise IndexError(f"indices reach from {low} to {high}, the vector has {n} elements")


def _magnitude_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32) & ABS_MASK


def _is_above(x: Tensor, threshold: float) -> Tensor:
    """``not |x| <= threshold``: for numbers the same as ``|x| > threshold``, and true for NaN."""
    check_threshold(threshold)
    return ~(x.abs() <= threshold)
