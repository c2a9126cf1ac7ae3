"""Drawing positions of a vector without replacement (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.sampling``.
"""

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Ints, array, u32, u64
from tersegrad.kernels.cpu._hashing import halves, hashed
from tersegrad.kernels.ops import check_sampling, shift_of

__all__ = ["stratified"]


def stratified(n: int, key: int, positions: Tensor) -> None:
    """One position in each of len(positions) equal slices of ``n`` elements, all rotated by one more draw."""
    check_sampling(n, positions.numel())
    low, high = halves(key)
    _stratified(n, low, high, shift_of(n, key), array(positions, torch.int32))


@numba.njit(nogil=True, cache=True)
def _stratified(n: int, low: np.uint32, high: np.uint32, shift: int, positions: Ints) -> None:
    k = positions.size
    if k == 0:
        return
    whole, part = n // k, n % k
    start, carry = 0, 0  # start + carry / k is i n / k, without a division per element
    for i in range(k):
        carry += part
        longer = int(carry >= k)
        carry -= k * longer
        length = whole + longer
        h = hashed(u32(i), low, high)
        position = start + np.int64((u64(h) * u64(length)) >> u64(32)) + shift
        positions[i] = position - n if position >= n else position
        start += length
