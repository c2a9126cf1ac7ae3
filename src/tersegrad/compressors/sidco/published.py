"""SIDCo as released: fixed shares, smallest exceedances as locations, stages adapted every five steps."""

import math

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.sidco import tails
from tersegrad.core import State, scratch

ADAPT_EVERY = 5  # steps between two adjustments of the number of stages
HIGH, LOW = 1.2, 0.8  # of the target: outside, one stage less or more
TINY = 2.2e-16  # added to normalised magnitudes before their logarithm is taken


def threshold(x: Tensor, ratio: float, first_ratio: float, law: str, stages: int, state: State) -> float | None:
    """What about ``ratio`` of all magnitudes exceed; None if ``x`` is not finite.

    Stage 1 fits all magnitudes, zeros too, and keeps ``first_ratio`` of them. Each later one of M fits what exceeds the
    threshold before it, from the smallest of these on, and keeps (ratio / first_ratio)^(1 / (M - 1)) of them.
    """
    y = torch.abs(x, out=scratch(state, "magnitudes", x.numel(), torch.float32, x.device))
    mean, variance = _moments(y, 0.0)
    if not math.isfinite(mean):
        return None
    if mean == 0.0:
        return 0.0
    single = stages == 1 or ratio >= first_ratio
    eta = _first(y, law, mean, variance, ratio if single else first_ratio)
    if single:
        return eta
    share = (ratio / first_ratio) ** (1 / (stages - 1))
    for _ in range(stages - 1):
        y = y[y > eta]
        if y.numel() < 2:
            break  # nothing left to fit
        location = float(y.min())
        mean, variance = _moments(y, location)
        fitted = tails.exponential(mean, share) if law == "exponential" else tails.pareto(mean, variance, share)
        eta = location + fitted
    return eta


def _moments(y: Tensor, location: float) -> tuple[float, float]:
    """Mean and unbiased variance of y - location."""
    total, squares = kernels.read(*_sums(y))
    count = y.numel()
    mean = total / count
    variance = max(0.0, (squares - total * mean) / (count - 1)) if count > 1 else 0.0
    return mean - location, variance


def _sums(y: Tensor) -> tuple[kernels.Answer, kernels.Answer]:
    _, total, squares = kernels.on(y).abs_sums(y, -1.0)
    return total, squares


def _first(y: Tensor, law: str, mean: float, variance: float, ratio: float) -> float:
    if law == "exponential":
        return tails.exponential(mean, ratio)
    if law == "pareto":
        return tails.pareto(mean, variance, ratio)
    norm = float(y.double().norm())
    mean_log = float((y.double() / norm + TINY).log().mean())
    return norm * tails.gamma(mean / norm, mean_log, ratio)


def adapted(stages: int, achieved: float, ratio: float) -> int:
    """One stage less if too much was sent, one more if too little; at most as many as halvings reach the ratio.

    >>> [adapted(3, q, 0.001) for q in (1.3, 1.1, 0.7)]
    [2, 3, 4]
    """
    most = max(1, math.ceil(math.log(ratio) / math.log(0.5)))
    step = -1 if achieved > HIGH else 1 if achieved < LOW else 0
    return min(max(stages + step, 1), most)
