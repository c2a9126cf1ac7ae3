"""Reading and adding to single elements of a vector, in plain torch: the definition fast kernels must meet."""

import torch
from torch import Tensor

from tersegrad.kernels.ops import Answer, check_indices, check_pairs
from tersegrad.kernels.reference.moments import all_finite

__all__ = ["gather", "scatter_add"]


def gather(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """``values[i] = x[indices[i]]``; IndexError if an index is not in [0, len(x))."""
    check_pairs(indices, values)
    check_indices(indices, x.numel())
    torch.index_select(x, 0, indices, out=values)


def scatter_add(acc: Tensor, indices: Tensor, values: Tensor, scale: float) -> Answer:
    """``acc[indices[i]] += scale * values[i]``, the product rounded to float32 before it is added.

    All indices are checked before anything is written; IndexError if one is not in [0, len(acc)). Returns whether all
    elements that it wrote are finite.

    >>> acc = torch.zeros(3)
    >>> bool(scatter_add(acc, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1.0, 2.0]), 0.5)), acc.tolist()
    (True, [0.5, 0.0, 1.0])
    """
    check_pairs(indices, values)
    check_indices(indices, acc.numel())
    return add_checked(acc, indices, values, scale)


def add_checked(acc: Tensor, indices: Tensor, values: Tensor, scale: float) -> Tensor:
    """``scatter_add`` of indices that are known to be in range."""
    acc.index_add_(0, indices, values * torch.tensor(scale, dtype=torch.float32))
    return all_finite(acc.index_select(0, indices))
