"""Argument checks for selecting elements by magnitude, and for lists of positions."""

import math

import torch
from torch import Tensor

from tersegrad.kernels.ops.answers import read

__all__ = ["check_indices", "check_k", "check_pairs", "check_threshold", "check_top_k", "top_k_capacity"]


def top_k_capacity(n: int, k: int) -> int:
    """How many int32 elements of scratch ``top_k`` needs: about 3 k + 16384, and never more than 2 n + 128.

    >>> top_k_capacity(1_000_000, 1000)
    19512
    """
    check_k(n, k)
    return 2 * (min(n, k + k // 2 + 8192) + 64)


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
    """Raise ValueError if the threshold is NaN, which compares false with everything."""
    if math.isnan(threshold):
        raise ValueError("threshold is NaN: the statistics it was made from are not finite")


def check_pairs(indices: Tensor, values: Tensor) -> None:
    """Raise ValueError unless there is one value for each index."""
    if indices.numel() != values.numel():
        raise ValueError(f"{indices.numel()} indices but {values.numel()} values: there must be one for each")


def check_indices(indices: Tensor, n: int) -> None:
    """Raise IndexError unless every index is in [0, n); this reads ``indices``."""
    if indices.numel() == 0:
        return
    low, high = read(*torch.aminmax(indices))
    if low < 0 or high >= n:
        raise IndexError(f"indices reach from {low} to {high}, the vector has {n} elements")
