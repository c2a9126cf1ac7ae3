"""Which elements are unambiguous (VGC), in plain torch: the definition."""

import torch
from torch import Tensor

from tersegrad.kernels.ops import FLOAT32_MAX, Answer, check_variance
from tersegrad.kernels.reference._masks import write_positions
from tersegrad.kernels.reference.moments import all_finite

__all__ = ["unambiguous"]

LARGEST = FLOAT32_MAX


def unambiguous(
    x: Tensor,
    variance: Tensor,
    squares: Tensor,
    alpha: float,
    zeta: float,
    tau: float,
    next_variance: Tensor,
    indices: Tensor,
) -> Answer:
    """Positions with ``x^2 > alpha v`` and ``|x| > tau``, ascending, as far as ``indices`` reaches; returns the count.

    ``v = variance + squares``, at most the largest float. ``next_variance`` becomes ``zeta v`` where nothing is sent,
    and ``max(v - 2 |x| tau + tau^2, 0)`` where +-tau is sent; ``tau = 0`` means that all of x is sent, which leaves 0.
    Where ``alpha v`` is 0, every x but 0 passes: squares of tiny numbers are 0 too. Returns -1 if x is non-finite,
    and both outputs are then unspecified.
    """
    check_variance(x, variance, squares, next_variance, alpha, zeta, tau)
    v = variance + squares
    v = torch.where(v <= FLOAT32_MAX, v, FLOAT32_MAX)
    bound = v * alpha
    magnitude = x.abs()
    sent = torch.where(bound == 0, magnitude > 0, x * x > bound) & (magnitude > tau)
    left = ((v - (magnitude * tau) * 2) + torch.tensor(tau).square()).clamp_min(0.0) if tau else torch.zeros_like(v)
    torch.where(sent, left, v * zeta, out=next_variance)
    return torch.where(all_finite(x), write_positions(sent, indices), -1)
