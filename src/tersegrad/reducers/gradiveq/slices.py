"""Slices: how the gradient of a convolution is split into vectors of equal length that resemble each other."""

import math
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from tersegrad import kernels

SHARED = 3  # slices of a layer, at least: with fewer a common basis is of no use
BLOCK = 1 << 17  # elements: with the basis beside them they fit into the L2 cache


@dataclass(frozen=True)
class Slicing:
    """One layer as ``count`` vectors of ``length`` elements; ``kernels.reference.slices`` defines their order."""

    filters: int  # F; 1 if the order is by filter
    positions: int  # P, if the order is by position; else 1
    run: int  # 1, if the order is by position; else elements that are consecutive in the layer and in the slice
    length: int  # K
    count: int

    @property
    def in_order(self) -> bool:
        """Whether slices are consecutive elements of the layer, so that nothing has to be moved."""
        return self.filters == 1

    def reuse(self, basis: str | int) -> int:
        """How many consecutive slices have a basis in common: the paper's reuse factor s."""
        if isinstance(basis, int):
            return basis
        return self.count if basis == "layer" else 1

    @property
    def block(self) -> int:
        """How many slices are moved and multiplied at a time: as many as the cache holds.

        By position, elements of a slice are far apart in the layer: all are moved at once.
        """
        return self.count if self.in_order or self.positions > 1 else max(1, BLOCK // self.length)

    def split(self, x: Tensor, buffer: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Slices ``first`` to ``last`` of ``x``, one per row: in the buffer, unless they lie in ``x`` as they are."""
        start, stop = first * self.length, (self.count if last is None else last) * self.length
        if self.in_order:
            slices = x[start:stop]
        else:
            slices = buffer[: stop - start]
            kernels.on(x).to_slices(x, slices, self.filters, self.positions, self.run, self._row(first))
        return slices.view(-1, self.length)

    def join(self, slices: Tensor, mean: Tensor, x: Tensor, subtract: bool = False, first: int = 0) -> None:
        """``x = slices + mean`` in the order of the layer, or ``x -= slices + mean``, in slices from ``first`` on."""
        layout = (self.filters, self.positions, self.run)
        kernels.on(x).from_slices(slices.view(-1), mean.view(-1), x, *layout, subtract, self._row(first))

    def _row(self, first: int) -> int:
        """The kernels' row with which a slice begins."""
        return first * self.length // (self.filters * self.run)


@cache
def slicing(shape: tuple[int, ...], size: int, order: str = "position", linear: bool = False) -> Slicing | None:
    """How a weight of this shape is split; None if it is not.

    Weights of three to five dimensions count as convolutions, (F, D, kernel...): D is the depth of a group in a
    grouped one, and the first dimension counts as filters in a transposed one. With ``linear``, so are matrices.

    By "filter" a slice is one filter, or some channels of it if that is too long: K elements as they lie in memory, K
    the largest that is at most ``size`` and a third of the layer among P * (divisors of D), or else divisors of P.

    By "position" (the paper's order: positions, depth, filters) a slice is all filters and channels at some positions
    of the kernel; by "channel" all filters and positions of some input channels. So with (middle, outer) = (D, P) or
    (P, D), the length K is the largest that is at most ``size`` and a third of the layer among F * middle * (divisors
    of outer); or, if all of these are too long, among F * (divisors of middle).

    >>> slicing((16, 16, 3, 3), 4096)  # the paper's example: three slices, a row of the kernel each
    Slicing(filters=16, positions=9, run=1, length=768, count=3)
    >>> slicing((256, 256, 3, 3), 4096).length // 256  # 256 * 256 is too long: 16 channels of all filters
    16
    >>> slicing((64, 64, 3, 3), 4096, order="channel").length // 64  # 4 channels, all positions, all filters
    36
    >>> slicing((64, 64, 3, 3), 4096, order="filter")  # one of 64 filters each
    Slicing(filters=1, positions=1, run=576, length=576, count=64)
    """
    dimensions = range(2 if linear else 3, 6)
    if len(shape) not in dimensions or not math.prod(shape):
        return None
    filters, depth, positions = shape[0], shape[1], math.prod(shape[2:])
    if order == "filter":
        longest = min(size, math.prod(shape) // SHARED)
        fits = [n for n in [positions * d for d in _divisors(depth)] + _divisors(positions) if n <= longest]
        return Slicing(1, 1, max(fits), max(fits), math.prod(shape) // max(fits)) if fits else None
    middle, outer = (depth, positions) if order == "position" else (positions, depth)
    longest = min(size, math.prod(shape) // SHARED) // filters
    lengths = [middle * d for d in _divisors(outer)] + _divisors(middle)
    length = filters * max((n for n in lengths if n <= longest), default=0)
    if not length:
        return None
    layout = (positions, 1) if order == "position" else (1, length // filters)
    return Slicing(filters, *layout, length, math.prod(shape) // length)


@cache
def published_slicing(shape: tuple[int, ...], size: int) -> Slicing | None:
    """The paper's slices: whole positions of the kernel of a convolution, with all filters and channels; None if none.

    K is F * D times the largest divisor of the positions that leaves three slices or more and K at most ``size``; one
    position if there are fewer than three. A layer whose F * D is longer than ``size`` is not split.

    >>> published_slicing((16, 16, 3, 3), 4096), published_slicing((64, 32, 1, 1), 4096).count
    (Slicing(filters=16, positions=9, run=1, length=768, count=3), 1)
    """
    if len(shape) not in range(3, 6) or not math.prod(shape):
        return None
    filters, depth, positions = shape[0], shape[1], math.prod(shape[2:])
    whole = filters * depth
    together = [j for j in _divisors(positions) if j * whole <= size and j <= max(1, positions // SHARED)]
    return Slicing(filters, positions, 1, whole * max(together), positions // max(together)) if together else None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
