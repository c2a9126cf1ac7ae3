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
TILE_RUNS = 8  # rows that are written side by side: more would evict each other


def to_slices(x: Tensor, slices: Tensor, filters: int, positions: int = 1, run: int = 1, first: int = 0) -> None:
    """Write rows of ``x`` into ``slices``, in the order of slices."""
    check_slices(x, slices, filters, positions, run, first)
    depth, rows = x.numel() // (filters * positions * run), slices.numel() // (filters * run)
    _split(array(x), array(slices), filters, depth, positions, run, first, rows)


def from_slices(
    slices: Tensor,
    mean: Tensor,
    x: Tensor,
    filters: int,
    positions: int = 1,
    run: int = 1,
    subtract: bool = False,
    first: int = 0,
) -> None:
    """``x = slices + mean``, or ``x -= slices + mean``, in those rows, with ``x`` in the order of the weight."""
    check_slices(x, slices, filters, positions, run, first)
    check_slices(x, mean, filters, positions, run, first)
    if slices.numel() != mean.numel():
        raise ValueError(f"{slices.numel()} elements do not go with a mean of {mean.numel()}")
    depth, rows = x.numel() // (filters * positions * run), slices.numel() // (filters * run)
    _join(array(slices), array(mean), array(x), filters, depth, positions, run, first, rows, subtract)


@numba.njit(nogil=True, cache=True)
def _runs_to_slices(x: Floats, slices: Floats, filters: int, blocks: int, run: int, first: int, rows: int) -> None:
    for q0 in range(0, rows, TILE_RUNS):
        q1 = min(q0 + TILE_RUNS, rows)
        for f in range(filters):
            for q in range(q0, q1):
                there, here = (q * filters + f) * run, (f * blocks + first + q) * run
                for k in range(run):
                    slices[there + k] = x[here + k]


@numba.njit(nogil=True, cache=True)
def _runs_from_slices(
    slices: Floats,
    mean: Floats,
    x: Floats,
    filters: int,
    blocks: int,
    run: int,
    first: int,
    rows: int,
    subtract: bool,
) -> None:
    for q0 in range(0, rows, TILE_RUNS):
        q1 = min(q0 + TILE_RUNS, rows)
        for f in range(filters):
            for q in range(q0, q1):
                there, here = (q * filters + f) * run, (f * blocks + first + q) * run
                if subtract:
                    for k in range(run):
                        x[here + k] -= slices[there + k] + mean[there + k]
                else:
                    for k in range(run):
                        x[here + k] = slices[there + k] + mean[there + k]


@numba.njit(nogil=True, cache=True)
def _to_slices(x: Floats, slices: Floats, filters: int, depth: int, positions: int, first: int, rows: int) -> None:
    """``rows`` of the depth from ``first`` on, at all positions."""
    deep = max(1, TILE_WIDTH // positions)
    tile = np.empty((deep * positions, TILE_FILTERS), np.float32)
    for f0 in range(0, filters, TILE_FILTERS):
        across = min(TILE_FILTERS, filters - f0)
        for d0 in range(0, rows, deep):
            width = min(deep, rows - d0) * positions
            for f in range(across):
                start = ((f0 + f) * depth + first + d0) * positions
                for k in range(width):
                    tile[k, f] = x[start + k]
            for k in range(width):
                start = (k % positions * rows + d0 + k // positions) * filters + f0
                for f in range(across):
                    slices[start + f] = tile[k, f]


@numba.njit(nogil=True, cache=True)
def _from_slices(
    slices: Floats,
    mean: Floats,
    x: Floats,
    filters: int,
    depth: int,
    positions: int,
    first: int,
    rows: int,
    subtract: bool,
) -> None:
    """``rows`` of the depth from ``first`` on, at all positions."""
    deep = max(1, TILE_WIDTH // positions)
    tile = np.empty((deep * positions, TILE_FILTERS), np.float32)
    for f0 in range(0, filters, TILE_FILTERS):
        across = min(TILE_FILTERS, filters - f0)
        for d0 in range(0, rows, deep):
            width = min(deep, rows - d0) * positions
            for k in range(width):
                start = (k % positions * rows + d0 + k // positions) * filters + f0
                for f in range(across):
                    tile[k, f] = slices[start + f] + mean[start + f]
            for f in range(across):
                start = ((f0 + f) * depth + first + d0) * positions
                if subtract:
                    for k in range(width):
                        x[start + k] -= tile[k, f]
                else:
                    for k in range(width):
                        x[start + k] = tile[k, f]


@numba.njit(nogil=True, cache=True)
def _rows_to_slices(x: Floats, slices: Floats, filters: int, depth: int, positions: int, first: int, rows: int) -> None:
    for r in range(rows):
        p, d = (first + r) // depth, (first + r) % depth
        for f in range(filters):
            slices[r * filters + f] = x[(f * depth + d) * positions + p]


@numba.njit(nogil=True, cache=True)
def _rows_from_slices(
    slices: Floats,
    mean: Floats,
    x: Floats,
    filters: int,
    depth: int,
    positions: int,
    first: int,
    rows: int,
    subtract: bool,
) -> None:
    for r in range(rows):
        p, d = (first + r) // depth, (first + r) % depth
        for f in range(filters):
            here, there = (f * depth + d) * positions + p, r * filters + f
            whole = slices[there] + mean[there]
            x[here] = x[here] - whole if subtract else whole


@numba.njit(nogil=True, cache=True)
def _split(
    x: Floats, slices: Floats, filters: int, depth: int, positions: int, run: int, first: int, rows: int
) -> None:
    """One function for all layouts, so that one compilation serves all layers of a model."""
    if run > 1:
        _runs_to_slices(x, slices, filters, depth, run, first, rows)
    elif positions == 1 or rows == depth * positions:
        _to_slices(x, slices, filters, depth, positions, first, rows // positions)
    else:
        _rows_to_slices(x, slices, filters, depth, positions, first, rows)


@numba.njit(nogil=True, cache=True)
def _join(
    slices: Floats,
    mean: Floats,
    x: Floats,
    filters: int,
    depth: int,
    positions: int,
    run: int,
    first: int,
    rows: int,
    subtract: bool,
) -> None:
    if run > 1:
        _runs_from_slices(slices, mean, x, filters, depth, run, first, rows, subtract)
    elif positions == 1 or rows == depth * positions:
        _from_slices(slices, mean, x, filters, depth, positions, first, rows // positions, subtract)
    else:
        _rows_from_slices(slices, mean, x, filters, depth, positions, first, rows, subtract)
