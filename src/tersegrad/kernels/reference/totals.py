"""Sums over a whole vector, from which thresholds are guessed, and counts that say how good the guess was.

In plain torch: the definition fast kernels must meet.
"""

from typing import NamedTuple

from torch import Tensor

from tersegrad.kernels.reference.select import _is_above


class Moments(NamedTuple):
    """Of all elements of a vector; finite if and only if all of them are."""

    total: float  # sum of x
    abs_total: float  # sum of |x|
    squares: float  # sum of x^2


def moments(x: Tensor) -> Moments:
    """Sums of x, of ``|x|`` and of x^2, accumulated in float64.

    >>> import torch
    >>> moments(torch.tensor([1.0, -3.0, 2.0]))
    Moments(total=0.0, abs_total=6.0, squares=14.0)
    """
    wide = x.double()
    return Moments(wide.sum().item(), wide.abs().sum().item(), wide.square().sum().item())


def count_above(x: Tensor, threshold: float) -> int:
    """How many elements have ``|x| > threshold``: the number that ``above`` returns, and no positions.

    >>> import torch
    >>> count_above(torch.tensor([1.0, -3.0, 2.0]), 1.0)
    2
    """
    return int(_is_above(x, threshold).sum())
