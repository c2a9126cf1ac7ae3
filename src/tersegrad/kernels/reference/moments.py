"""Sums over a whole vector, from which thresholds are estimated, and counts that tell how good an estimate was.

In plain torch: the definition fast kernels must meet.
"""

from typing import cast

import torch
from torch import Tensor

from tersegrad.kernels.ops import ABS_MASK, INF_BITS, Answer, Moments
from tersegrad.kernels.reference._masks import is_above

__all__ = ["abs_log_sum", "abs_max", "abs_sums", "all_finite", "count_above", "moments"]


def all_finite(x: Tensor) -> Tensor:
    """Whether ``x`` contains neither NaN nor infinity.

    >>> bool(all_finite(torch.tensor([1.0, -2.0]))), bool(all_finite(torch.tensor([1.0, float("nan")])))
    (True, False)
    """
    return ((x.view(torch.int32) & ABS_MASK) < INF_BITS).all()


def abs_max(x: Tensor) -> Answer:
    """The largest ``|x|``, 0 if there is none; infinite or NaN if and only if an element of ``x`` is."""
    return (x.view(torch.int32) & ABS_MASK).max().view(torch.float32) if x.numel() else 0.0


def moments(x: Tensor) -> Moments:
    """Sums of x, of ``|x|`` and of x^2, accumulated in float64.

    >>> from tersegrad.kernels.ops import read
    >>> read(*moments(torch.tensor([1.0, -3.0, 2.0])))
    (0.0, 6.0, 14.0)
    """
    wide = x.double()
    sums = wide.sum(), wide.abs().sum(), wide.square().sum()
    return Moments(*cast("tuple[float, float, float]", sums))  # tensors here; numbers once they are read


def count_above(x: Tensor, threshold: float) -> Answer:
    """How many elements have ``|x| > threshold``: the count that ``above`` returns, without the positions.

    >>> int(count_above(torch.tensor([1.0, -3.0, 2.0]), 1.0))
    2
    """
    return is_above(x, threshold).sum()


def abs_sums(x: Tensor, threshold: float) -> tuple[Answer, Answer, Answer]:
    """``(count, sum |x|, sum x^2)`` over the elements with ``|x| > threshold``, accumulated in float64.

    The count is that of ``above``; a negative threshold takes every element. NaN counts as above every
    threshold, so with a finite one both sums are finite if and only if all elements are.

    >>> from tersegrad.kernels.ops import read
    >>> read(*abs_sums(torch.tensor([1.0, -3.0, 2.0]), 1.0))
    (2, 5.0, 13.0)
    """
    mask = is_above(x, threshold)
    large = torch.where(mask, x.abs(), 0.0).double()
    return mask.sum(), large.sum(), large.square().sum()


def abs_log_sum(x: Tensor) -> Answer:
    """Sum of ``ln |x|`` over the non-zero elements, accumulated in float64; denormals count as the least normal number.

    >>> round(float(abs_log_sum(torch.tensor([2.718281828, 0.0, -1.0]))), 6)
    1.0
    """
    return torch.where(x != 0, x.abs().double().clamp(min=2.0**-126), 1.0).log().sum()
