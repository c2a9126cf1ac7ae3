"""Selecting the large elements of a float32 vector, in plain torch: the definition fast kernels must meet.

Magnitudes are ordered by the integer ``bits(x) & 0x7fffffff``. On finite numbers that is the order of ``|x|``
(so -0.0 equals 0.0); above them come infinity and then NaN, which are therefore above every threshold.
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import ABS_MASK, Answer, check_top_k, top_k_capacity
from tersegrad.kernels.reference._masks import is_above, write_positions
from tersegrad.kernels.reference.moments import all_finite

__all__ = ["above", "top_k", "top_k_capacity"]


def top_k(x: Tensor, k: int, indices: Tensor, candidates: Tensor) -> Answer:
    """Write the positions of the k largest ``|x|`` to ``indices[:k]``, in ascending order of position.

    Among equal magnitudes the lowest positions win. Returns k; or -1, and leaves ``indices`` unchanged, if any
    element of ``x`` is not finite. ``candidates`` is int32 scratch of ``top_k_capacity(len(x), k)`` elements.

    >>> indices = torch.empty(2, dtype=torch.int32)
    >>> candidates = torch.empty(top_k_capacity(4, 2), dtype=torch.int32)
    >>> int(top_k(torch.tensor([1.0, -3.0, 2.0, 2.0]), 2, indices, candidates)), indices.tolist()
    (2, [1, 2])
    """
    check_top_k(x, k, indices, candidates)
    finite = all_finite(x)
    largest_first = torch.argsort(x.view(torch.int32) & ABS_MASK, descending=True, stable=True)
    chosen = largest_first[:k].sort().values.to(torch.int32)
    indices[:k] = torch.where(finite, chosen, indices[:k])
    return torch.where(finite, k, -1)


def above(x: Tensor, threshold: float, indices: Tensor) -> Answer:
    """Write the positions of all elements with ``|x| > threshold``, ascending, as far as ``indices`` reaches.

    Returns how many there are, even when ``indices`` is too short for them. The threshold is rounded to
    float32. NaN counts as above every threshold, so that a non-finite gradient shows in the selection.

    >>> indices = torch.full((3,), -1, dtype=torch.int32)
    >>> int(above(torch.tensor([1.0, -3.0, 2.0]), 1.0, indices)), indices.tolist()
    (2, [1, 2, -1])
    """
    return write_positions(is_above(x, threshold), indices)
