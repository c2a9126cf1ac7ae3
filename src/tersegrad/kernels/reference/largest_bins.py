"""The largest bins of spectra that come one block after another, in plain torch: the definition.

A bin and its magnitude are those of ``fold``. Candidates are kept in three parallel arrays: positions, keys (the bits
of their magnitudes) and values (two numbers each). ``progress`` holds three numbers:

    how many candidates there are
    the key that a bin must reach to become one
    how many blocks had numbers that are too large or too small to be squared (``SQUARES``), or were non-finite
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import INF_BITS, SQUARES, Answer, check_collect
from tersegrad.kernels.reference.spectrum import fold

__all__ = ["choose_bins", "collect_bins"]


def collect_bins(
    half: Tensor, place: int, k: int, progress: Tensor, positions: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Add the bins of a block that reach the key in ``progress`` to the candidates; ``place`` is its first bin's.

    If there is no room for more, only the k largest so far stay, and a later bin must be larger than all of them are.
    """
    check_collect(half, k, progress, positions, keys, values)
    numel = half.shape[0] * (half.shape[1] - 1)
    bins, magnitudes = torch.empty(2 * numel, device=half.device), torch.empty(numel, device=half.device)
    fold(half, bins, magnitudes)
    largest = magnitudes.amax() if numel else bins.new_zeros(())
    progress[2] += ~((largest >= SQUARES[0]) & (largest <= SQUARES[1])) & bins.any()
    patterns = magnitudes.view(torch.int32)
    (reached,) = (patterns >= progress[1]).nonzero(as_tuple=True)
    old = int(progress[0])
    every_position = torch.cat([positions[:old], (reached + place).to(torch.int32)])
    every_key = torch.cat([keys[:old], patterns[reached]])
    every_value = torch.cat([values.view(-1, 2)[:old], bins.view(-1, 2)[reached]])
    if every_key.numel() > keys.numel():
        best = _largest(every_key, k)
        every_position, every_key, every_value = every_position[best], every_key[best], every_value[best]
        progress[1] = min(int(every_key.min()), INF_BITS) + 1
    count = every_key.numel()
    progress[0] = count
    positions[:count], keys[:count], values.view(-1, 2)[:count] = every_position, every_key, every_value


def choose_bins(k: int, progress: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Answer:
    """Move the k largest candidates to the front, in ascending order of position; among equals the lowest win.

    Returns k. If there are fewer candidates it returns their number, and -1 if ``progress`` counts a block that could
    not be squared; then the candidates are unspecified.

    >>> half = torch.fft.rfft(torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0, 0.0]]))
    >>> progress, room = torch.zeros(3, dtype=torch.int64), 1 + 1024
    >>> positions, keys = torch.empty(2, room, dtype=torch.int32)
    >>> values = torch.empty(2 * room)
    >>> collect_bins(half, 0, 1, progress, positions, keys, values)
    >>> int(choose_bins(1, progress, positions, keys, values)), int(positions[0]), values[:2].tolist()
    (1, 0, [6.0, -2.0])
    """
    count, unsafe = int(progress[0]), int(progress[2])
    if unsafe or count < k:
        return -1 if unsafe else count
    best = _largest(keys[:count], k)
    positions[:k], keys[:k], values.view(-1, 2)[:k] = positions[best], keys[best], values.view(-1, 2)[best]
    return k


def _largest(keys: Tensor, k: int) -> Tensor:
    """Where the k largest are, ascending."""
    return torch.argsort(keys, descending=True, stable=True)[:k].sort().values
