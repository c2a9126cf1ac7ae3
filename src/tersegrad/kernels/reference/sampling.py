"""Drawing positions of a vector without replacement, in plain torch: the definition fast kernels must meet.

``hashed(key, i)`` is a number of 32 bits for each counter: the same on every machine and device, in any order.
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import MIX_1, MIX_2, MIX_3, UNIFORM_BITS, check_sampling, shift_of, split_key

__all__ = ["stratified"]


def stratified(n: int, key: int, positions: Tensor) -> None:
    """Write k = len(positions) different positions of a vector of ``n`` elements to ``positions`` (int32).

    One is drawn in each of k slices, whose lengths differ by one at most, and all of them are rotated by one more draw.
    So every position is drawn with the same probability k / n, also if k does not divide n. They ascend, except where
    the rotation wraps around the end.

    >>> positions = torch.empty(4, dtype=torch.int32)
    >>> stratified(40, 7, positions), positions.tolist()
    (None, [38, 7, 15, 21])
    """
    k = positions.numel()
    check_sampling(n, k)
    if k == 0:
        return
    bounds = torch.arange(k + 1, device=positions.device) * n // k
    offsets = hashed(key, k, positions.device) * bounds.diff() >> 32
    positions.copy_((bounds[:-1] + offsets + shift_of(n, key)) % n)


def hashed(key: int, count: int, device: torch.device) -> Tensor:
    """The hashed numbers of the counters 0 to ``count`` - 1, from 0 to 2^32 - 1."""
    low, high = split_key(key)
    h = torch.arange(count, device=device) + low & 0xFFFFFFFF
    h = (h ^ (h >> 16)) * MIX_1 + high & 0xFFFFFFFF  # the key enters twice: otherwise keys would only shift counters
    h = (h ^ (h >> 13)) * MIX_2 & 0xFFFFFFFF
    h = (h ^ (h >> 16)) * MIX_3 & 0xFFFFFFFF
    return h ^ (h >> 15)


def uniform(key: int, n: int, device: torch.device) -> Tensor:
    """The highest 24 bits of the hashed number of each position.

    >>> uniform(1, 3, torch.device("cpu")).tolist()
    [10844287, 11043291, 13949022]
    """
    return hashed(key, n, device) >> 32 - UNIFORM_BITS
