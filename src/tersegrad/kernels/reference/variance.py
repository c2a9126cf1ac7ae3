"""Which elements are unambiguous (VGC), in plain torch: the definition of the result."""

import math

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max


def unambiguous(
    x: Tensor,
    variance: Tensor,
    squares: Tensor,
    alpha: float,
    zeta: float,
    tau: float,
    next_variance: Tensor,
    indices: Tensor,
) -> int:
    """Positions with ``x^2 > alpha v`` and ``|x| > tau``, ascending, as far as ``indices`` reaches; returns the count.

    ``v = variance + squares``, at most the largest float. ``next_variance`` becomes ``zeta v`` where nothing is sent,
    and ``max(v - 2 |x| tau + tau^2, 0)`` where +-tau is sent; ``tau = 0`` means that all of x is sent, which leaves 0.
    Where ``alpha v`` is 0, every x but 0 passes: squares of tiny numbers are 0 too. Returns -1 if x is not finite.
    """
    check_variance(x, variance, squares, next_variance, alpha, zeta, tau)
    if not x.isfinite().all():
        return -1
    v = variance + squares
    v[~(v <= LARGEST)] = LARGEST
    bound = v * alpha
    magnitude = x.abs()
    sent = torch.where(bound == 0, magnitude > 0, x * x > bound) & (magnitude > tau)
    left = ((v - (magnitude * tau) * 2) + torch.tensor(tau).square()).clamp_min(0.0) if tau else torch.zeros_like(v)
    torch.where(sent, left, v * zeta, out=next_variance)
    positions = sent.nonzero().flatten().to(torch.int32)
    room = min(indices.numel(), positions.numel())
    indices[:room].copy_(positions[:room])
    return positions.numel()


def check_variance(
    x: Tensor, variance: Tensor, squares: Tensor, next_variance: Tensor, alpha: float, zeta: float, tau: float
) -> None:
    """Refuses lengths that differ and numbers that mean nothing."""
    lengths = {tensor.numel() for tensor in (x, variance, squares, next_variance)}
    if len(lengths) > 1:
        raise ValueError(f"gradient, variance and squares must be of one length, and these are of {sorted(lengths)}")
    for name, value in (("alpha", alpha), ("zeta", zeta), ("tau", tau)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value} is not a finite number from 0 on")
