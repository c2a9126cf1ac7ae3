"""Adding two vectors and selecting from their sum, in plain torch: the definition fast kernels must meet."""

from torch import Tensor

from tersegrad.kernels.ops import Answer
from tersegrad.kernels.reference.add import add_scaled
from tersegrad.kernels.reference.select import top_k

__all__ = ["add_top_k"]


def add_top_k(a: Tensor, b: Tensor, k: int, total: Tensor, indices: Tensor, candidates: Tensor) -> Answer:
    """``total = a + b``, and ``top_k`` of ``total``, which is unspecified if the sum is non-finite.

    >>> import torch
    >>> from tersegrad.kernels.ops import top_k_capacity
    >>> indices, total = torch.empty(1, dtype=torch.int32), torch.empty(2)
    >>> candidates = torch.empty(top_k_capacity(2, 1), dtype=torch.int32)
    >>> int(add_top_k(torch.tensor([1.0, 2.0]), torch.tensor([2.0, -1.0]), 1, total, indices, candidates))
    1
    >>> total.tolist(), indices.tolist()
    ([3.0, 1.0], [0])
    """
    add_scaled(a, b, 1.0, total)
    return top_k(total, k, indices, candidates)
