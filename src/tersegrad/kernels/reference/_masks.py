"""Selections of elements as boolean vectors, without synchronising with the host."""

import torch
from torch import Tensor

from tersegrad.kernels.ops import check_threshold


def is_above(x: Tensor, threshold: float) -> Tensor:
    """``not |x| <= threshold``: for numbers the same as ``|x| > threshold``, and true for NaN."""
    check_threshold(threshold)
    return ~(x.abs() <= threshold)


def write_positions(mask: Tensor, indices: Tensor) -> Tensor:
    """Write the positions where ``mask`` is true, ascending, as far as ``indices`` reaches; return their number.

    ``nonzero`` would synchronise with the host, which needs the count to allocate the result.
    """
    capacity = indices.numel()
    ranks = mask.cumsum(0)
    places = torch.where(mask & (ranks <= capacity), ranks - 1, capacity)  # the last place is a dummy for all others
    found = torch.cat([indices, indices.new_empty(1)])
    positions = torch.arange(mask.numel(), dtype=indices.dtype, device=mask.device)
    indices.copy_(found.scatter_(0, places, positions)[:capacity])
    return mask.sum()
