"""A convolution's gradient in the order in which its filters lie side by side, and back (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.slices``; here is only how: by tiles that
fit the first cache, because rows that are powers of two apart would push each other out of it.
"""

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.reference.slices import check_slices

Floats = NDArray[np.float32]

TILE_FILTERS = 64
TILE_WIDTH = 72  # elements of one filter in a tile


def to_slices(x: Tensor, slices: Tensor, filters: int, positions: int) -> None:
    """Writes ``x`` into ``slices``, with the filters fastest, then depth, then positions."""
    check_slices(x, slices, filters, positions)
    _to_slices(x.numpy(), slices.numpy(), filters, x.numel() // (filters * positions), positions)


def from_slices(slices: Tensor, mean: Tensor, x: Tensor, filters: int, positions: int, subtract: bool = False) -> None:
    """``x = slices + mean``, or ``x -= slices + mean``, with ``x`` in its own order."""
    check_slices(x, slices, filters, positions)
    check_slices(x, mean, filters, positions)
    depth = x.numel() // (filters * positions)
    _from_slices(slices.numpy(), mean.numpy(), x.numpy(), filters, depth, positions, subtract)


@numba.njit(nogil=True, cache=True)
def _to_slices(x: Floats, slices: Floats, filters: int, depth: int, positions: int) -> None:
    deep = max(1, TILE_WIDTH // positions)
    tile = np.empty((deep * positions, TILE_FILTERS), np.float32)
    for f0 in range(0, filters, TILE_FILTERS):
        rows = min(TILE_FILTERS, filters - f0)
        for d0 in range(0, depth, deep):
            width = min(deep, depth - d0) * positions
            for f in range(rows):
                start = ((f0 + f) * depth + d0) * positions
                for k in range(width):
                    tile[k, f] = x[start + k]
            for k in range(width):
                start = (k % positions * depth + d0 + k // positions) * filters + f0
                for f in range(rows):
                    slices[start + f] = tile[k, f]


@numba.njit(nogil=True, cache=True)
def _from_slices(
    slices: Floats, mean: Floats, x: Floats, filters: int, depth: int, positions: int, subtract: bool
) -> None:
    deep = max(1, TILE_WIDTH // positions)
    tile = np.empty((deep * positions, TILE_FILTERS), np.float32)
    for f0 in range(0, filters, TILE_FILTERS):
        rows = min(TILE_FILTERS, filters - f0)
        for d0 in range(0, depth, deep):
            width = min(deep, depth - d0) * positions
            for k in range(width):
                start = (k % positions * depth + d0 + k // positions) * filters + f0
                for f in range(rows):
                    tile[k, f] = slices[start + f] + mean[start + f]
            for f in range(rows):
                start = ((f0 + f) * depth + d0) * positions
                if subtract:
                    for k in range(width):
                        x[start + k] -= tile[k, f]
                else:
                    for k in range(width):
                        x[start + k] = tile[k, f]
