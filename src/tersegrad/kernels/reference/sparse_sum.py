"""A sum of sparse vectors, in plain torch: the definition fast kernels must meet."""

import torch
from torch import Tensor

from tersegrad.kernels.ops import Answer, check_ascending, check_counts
from tersegrad.kernels.reference.gather import add_checked

__all__ = ["scatter_sum"]


def scatter_sum(indices: Tensor, values: Tensor, counts: list[int], scale: float, out: Tensor) -> Answer:
    """``out = scale * (sum of sparse vectors)``, added one after the other; returns whether all of ``out`` is finite.

    Indices and values of all vectors are concatenated, ``counts[i]`` of vector i; the indices of one vector ascend.

    >>> out = torch.empty(4)
    >>> bool(scatter_sum(torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([1.0, 2.0, 4.0]), [2, 1], 0.5, out))
    True
    >>> out.tolist()
    [0.5, 0.0, 3.0, 0.0]
    """
    check_counts(indices, values, counts)
    check_ascending(indices, counts, out.numel())
    out.zero_()
    parts = zip(indices.split(counts), values.split(counts), strict=True)
    finite = [add_checked(out, positions, part, scale) for positions, part in parts]
    return torch.stack(finite).all() if finite else True
