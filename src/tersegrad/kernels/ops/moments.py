"""Sums over a whole vector."""

from typing import NamedTuple

__all__ = ["Moments"]


class Moments(NamedTuple):
    """Of all elements of a vector; finite if and only if all of them are."""

    total: float  # sum of x
    abs_total: float  # sum of |x|
    squares: float  # sum of x^2
