"""A convolution's gradient in an order that can be split into slices, and back (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.slices``. Transpositions go by tiles that
fit into the L1 cache, because rows that are powers of two apart would evict each other.
"""

import numba
import numpy as np
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Floats, array
from tersegrad.kernels.ops import check_slices

__all__ = ["from_slices", "to_slices"]

TILE_FILTERS = 64
TILE_WIDTH = 72  # elements of one filter in a tile


def to_slices(x: Tensor, slices: Tensor, filters: int, positions: int = 1, run: int = 1) -> None:
    """Write ``x`` into ``slices``, in the order of slices."""
    check_slices(x, slices, filters, positions, run)
    depth = x.numel() // (filters * positions * run)
    if run > 1:
        _runs_to_slices(array(x), array(slices), filters, depth, run)
    else:
        _to_slices(array(x), array(slices), filters, depth, positions)


def from_slices(
    slices: Tensor, mean: Tensor, x: Tensor, filters: int, positions: int = 1, run: int = 1, subtract: bool = False
) -> None:
    """``x = slices + mean``, or ``x -= slices + mean``, with ``x`` in the order of the weight."""
    check_slices(x, slices, filters, positions, run)
    check_slices(x, mean, filters, positions, run)
    depth = x.numel() // (filters * positions * run)
    if run > 1:
        _runs_from_slices(array(slices), array(mean), array(x), filters, depth, run, subtract)
    else:
        _from_slices(array(slices), array(mean), array(x), filters, depth, positions, subtract)


@numba.njit(nogil=True, cache=True)
def _runs_to_slices(x: Floats, slices: Floats, filters: int, blocks: int, run: int) -> None:
    for q in range(blocks):
        for f in range(filters):
            there, here = (q * filters + f) * run, (f * blocks + q) * run
            for k in range(run):
                slices[there + k] = x[here + k]


@numba.njit(nogil=True, cache=True)
def _runs_from_slices(
    slices: Floats, mean: Floats, x: Floats, filters: int, blocks: int, run: int, subtract: bool
) -> None:
    for q in range(blocks):
        for f in range(filters):
            there, here = (q * filters + f) * run, (f * blocks + q) * run
            if subtract:
                for k in range(run):
                    x[here + k] -= slices[there + k] + mean[there + k]
            else:
                for k in range(run):
                    x[here + k] = slices[there + k] + mean[there + k]


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
