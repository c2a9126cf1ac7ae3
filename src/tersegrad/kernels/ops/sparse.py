"""Argument checks for several sparse vectors, concatenated."""

from itertools import accumulate

import torch
from torch import Tensor

from tersegrad.kernels.ops.answers import read
from tersegrad.kernels.ops.select import check_pairs

__all__ = ["check_ascending", "check_counts"]


def check_counts(indices: Tensor, values: Tensor, counts: list[int]) -> None:
    """Raise ValueError unless there is one value for each index, and ``counts`` add up to their number."""
    check_pairs(indices, values)
    if sum(counts) != indices.numel() or min(counts, default=0) < 0:
        raise ValueError(f"{indices.numel()} indices do not split into vectors of {counts}")


def check_ascending(indices: Tensor, counts: list[int], n: int) -> None:
    """Raise IndexError unless every index is in [0, n), and those of each vector ascend; this reads ``indices``."""
    if indices.numel() == 0:
        return
    rises = indices.diff() > 0
    for end in accumulate(counts):
        if 0 < end < indices.numel():
            rises[end - 1] = True  # between two vectors the indices may fall
    low, high, ascend = read(*torch.aminmax(indices), rises.all())
    if low < 0 or high >= n:
        raise IndexError(f"indices reach from {low} to {high}, the vector has {n} elements")
    if not ascend:
        raise IndexError("the indices of one sparse vector must ascend")
