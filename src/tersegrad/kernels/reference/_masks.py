"""Which elements are meant, as a vector of truths; without a word to the host."""

import torch
from torch import Tensor

from tersegrad.kernels.ops import check_threshold


def is_above(x: Tensor, threshold: float) -> Tensor:
    """``not |x| <= threshold``: for numbers the same as ``|x| > threshold``, and true for NaN."""
    check_threshold(threshold)
    return ~(x.abs() <= threshold)


def write_positions(mask: Tensor, indices: Tensor) -> Tensor:
    """Write where ``mask`` is true, ascending, as far as ``indices`` reaches; how often it is, as a tensor.

    ``nonzero`` would have to tell the host how many there are before it can return them.
    """
    capacity = indices.numel()
    ranks = mask.cumsum(0)
    places = torch.where(mask & (ranks <= capacity), ranks - 1, capacity)  # the last place takes what is not wanted
    found = torch.cat([indices, indices.new_empty(1)])
    positions = torch.arange(mask.numel(), dtype=indices.dtype, device=mask.device)
    indices.copy_(found.scatter_(0, places, positions)[:capacity])
    return mask.sum()
