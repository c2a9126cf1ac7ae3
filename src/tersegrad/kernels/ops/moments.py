"""Sums over a whole vector."""

from typing import NamedTuple

__all__ = ["Moments"]


class Moments(NamedTuple):
    """Sums over all elements of a vector; the sums are finite if and only if all elements are."""

    total: float  # sum of x
    abs_total: float  # sum of |x|
    squares: float  # sum of x^2
