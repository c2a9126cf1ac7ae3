"""Slices: how the gradient of a convolution is cut into vectors of equal length that resemble each other."""

import math
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from tersegrad import kernels

SHARED = 3  # slices of a layer, at least: with fewer there is nothing that one basis could serve


@dataclass(frozen=True)
class Slicing:
    """One layer seen as ``count`` vectors of ``length`` elements.

    A weight is (F filters, D depth, P positions of the kernel). Its elements are put in an order with the filters
    fastest, and every ``length`` of them are a slice.
    """

    filters: int
    positions: int  # that come after depth in the order; 1 if the weight is only transposed
    length: int  # K
    count: int

    def cut(self, x: Tensor, slices: Tensor) -> Tensor:
        """The slices of ``x``, one in a row, written into the vector ``slices``."""
        kernels.on(x).to_slices(x, slices, self.filters, self.positions)
        return slices.view(self.count, self.length)

    def join(self, slices: Tensor, mean: Tensor, x: Tensor, subtract: bool = False) -> None:
        """``x = slices + mean`` in the order of the layer, or ``x -= slices + mean``."""
        kernels.on(x).from_slices(slices.view(-1), mean.view(-1), x, self.filters, self.positions, subtract)


@cache
def slicing(shape: tuple[int, ...], size: int, order: str = "position", linear: bool = False) -> Slicing | None:
    """How a weight of this shape is cut, by its shape alone; None if it is left as it is.

    Weights of three to five dimensions are taken for convolutions, (F, D, kernel...): D is the depth of a group in a
    grouped one, and the first dimension counts as filters in a transposed one. With ``linear``, so are matrices.

    The order is "position" (position, depth, filter), as in the paper, or "channel" (depth, position, filter). The
    length is the largest of these that is at most ``size`` and a third of the layer: F times all of the middle index
    times a divisor of the outer one; or, where that is too long, F times a divisor of the middle index.

    >>> slicing((16, 16, 3, 3), 4096)  # the paper's example: three slices, a row of the kernel each
    Slicing(filters=16, positions=9, length=768, count=3)
    >>> slicing((256, 256, 3, 3), 4096).length // 256  # 256 * 256 is too long: 16 channels of all filters
    16
    >>> slicing((64, 64, 3, 3), 4096, order="channel").length // 64  # 4 channels, all positions, all filters
    36
    """
    dimensions = range(2 if linear else 3, 6)
    if len(shape) not in dimensions or not math.prod(shape):
        return None
    filters, depth, positions = shape[0], shape[1], math.prod(shape[2:])
    middle, outer = (depth, positions) if order == "position" else (positions, depth)
    room = min(size, math.prod(shape) // SHARED) // filters
    lengths = [middle * d for d in _divisors(outer)] + _divisors(middle)
    length = filters * max((n for n in lengths if n <= room), default=0)
    if not length:
        return None
    after_depth = positions if order == "position" else 1
    return Slicing(filters, after_depth, length, math.prod(shape) // length)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
