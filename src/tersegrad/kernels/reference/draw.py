"""Drawing positions of a vector without replacement, in plain torch: the definition fast kernels must meet.

``hashed(key, i)`` is a number of 32 bits for each counter: the same on every machine and device, in any order.
"""

import torch
from torch import Tensor

from tersegrad.kernels.reference.qsgd import MIX_1, MIX_2, MIX_3, split_key

OTHER_DRAW = 0x2545F4914F6CDD1D  # makes of a key one that has nothing to do with it


def stratified(n: int, key: int, positions: Tensor) -> None:
    """Write k = len(positions) different positions of a vector of ``n`` elements to ``positions`` (int32).

    One is drawn in each of k stretches that are equal to one element, and all of them are shifted round the vector by
    one more draw. So every position is drawn with the same probability k / n, also where k does not divide n. They
    ascend, but for one place where the shift goes over the end.

    >>> positions = torch.empty(4, dtype=torch.int32)
    >>> stratified(40, 7, positions), positions.tolist()
    (None, [38, 7, 15, 21])
    """
    k = positions.numel()
    check_draw(n, k)
    if k == 0:
        return
    bounds = torch.arange(k + 1, device=positions.device) * n // k
    offsets = hashed(key, k, positions.device) * bounds.diff() >> 32
    positions.copy_((bounds[:-1] + offsets + shift_of(n, key)) % n)


def hashed(key: int, count: int, device: torch.device) -> Tensor:
    """The hashed numbers of the counters 0 to ``count`` - 1, from 0 to 2^32 - 1."""
    low, high = split_key(key)
    h = torch.arange(count, device=device) + low & 0xFFFFFFFF
    h = (h ^ (h >> 16)) * MIX_1 + high & 0xFFFFFFFF  # the key comes in twice: otherwise keys would only shift counters
    h = (h ^ (h >> 13)) * MIX_2 & 0xFFFFFFFF
    h = (h ^ (h >> 16)) * MIX_3 & 0xFFFFFFFF
    return h ^ (h >> 15)


def shift_of(n: int, key: int) -> int:
    """How far all positions are shifted: 0 to n - 1, drawn from 64 bits of the key."""
    low, high = split_key(key ^ OTHER_DRAW)
    return (high << 32 | low) * n >> 64


def check_draw(n: int, k: int) -> None:
    """Raise ValueError unless k different positions of n can be drawn and written as int32."""
    if not 0 <= k <= n < 2**31:
        raise ValueError(f"cannot draw {k} different positions of {n} elements: k is from 0 to n, and n below 2^31")
