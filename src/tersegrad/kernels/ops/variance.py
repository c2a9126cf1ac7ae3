"""Argument checks for selecting unambiguous elements (VGC)."""

import math

from torch import Tensor

__all__ = ["check_variance"]


def check_variance(
    x: Tensor, variance: Tensor, squares: Tensor, next_variance: Tensor, alpha: float, zeta: float, tau: float
) -> None:
    """Raise ValueError if lengths differ, or a factor is negative or not finite."""
    lengths = {tensor.numel() for tensor in (x, variance, squares, next_variance)}
    if len(lengths) > 1:
        raise ValueError(f"gradient, variance and squares must be of one length, got {sorted(lengths)}")
    for name, value in (("alpha", alpha), ("zeta", zeta), ("tau", tau)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value} is not a finite number >= 0")
