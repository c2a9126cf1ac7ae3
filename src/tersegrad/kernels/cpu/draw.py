"""Drawing positions of a vector without replacement (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.draw``; here is only how.
"""

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu.select import _array
from tersegrad.kernels.reference import qsgd as reference
from tersegrad.kernels.reference.draw import check_draw, shift_of
from tersegrad.kernels.reference.qsgd import split_key

__all__ = ["stratified"]

Ints = NDArray[np.int32]

u32: Any = np.uint32  # around every operation: Numba widens to 64 bits otherwise
u64: Any = np.uint64
MIX_1, MIX_2, MIX_3 = np.uint32(reference.MIX_1), np.uint32(reference.MIX_2), np.uint32(reference.MIX_3)


def stratified(n: int, key: int, positions: Tensor) -> None:
    """One position in each of len(positions) equal stretches of ``n`` elements, all shifted round by one draw."""
    check_draw(n, positions.numel())
    low, high = (u32(half) for half in split_key(key))
    _stratified(n, low, high, shift_of(n, key), _array(positions, torch.int32))


@numba.njit(nogil=True, cache=True)
def _stratified(n: int, low: np.uint32, high: np.uint32, shift: int, positions: Ints) -> None:
    k = positions.size
    if k == 0:
        return
    whole, part = n // k, n % k
    start, carry = 0, 0  # start + carry / k is i n / k: no division for each
    for i in range(k):
        carry += part
        longer = int(carry >= k)
        carry -= k * longer
        length = whole + longer
        h = u32(u32(i) + low)
        h = u32(u32(u32(h ^ (h >> u32(16))) * MIX_1) + high)
        h = u32(u32(h ^ (h >> u32(13))) * MIX_2)
        h = u32(u32(h ^ (h >> u32(16))) * MIX_3)
        h = u32(h ^ (h >> u32(15)))
        position = start + np.int64((u64(h) * u64(length)) >> u64(32)) + shift
        positions[i] = position - n if position >= n else position
        start += length
