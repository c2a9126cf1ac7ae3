"""Sums of two whole vectors, in plain torch: the definition fast kernels must meet."""

import torch
from torch import Tensor

from tersegrad.kernels.ops import check_add

__all__ = ["add_scaled"]


def add_scaled(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """``out = a + scale * b``; it is unspecified whether the product is rounded before it is added.

    ``out`` must not overlap ``a`` or ``b``.

    >>> out = torch.empty(2)
    >>> add_scaled(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0]), -0.25, out)
    >>> out
    tensor([0., 0.])
    """
    check_add(a, b, out)
    torch.add(a, b, alpha=scale, out=out)
