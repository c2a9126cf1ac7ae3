"""Thresholds from fitted distributions: the magnitude that a positive random variable exceeds with probability ratio.

Each function takes moments of the sample and returns eta with P(|x| > eta) = ratio for the fitted law (Abdelmoniem et
al., "An efficient statistical-based gradient compression technique for distributed training systems", MLSys 2021).
A sample without spread fits none of them; its own value is returned, which no element exceeds.
"""

import math

import torch


def exponential(mean: float, ratio: float) -> float:
    """Exponential distribution of scale ``mean``: eta = mean ln(1/ratio).

    >>> exponential(2.0, math.exp(-3))
    6.0
    """
    return mean * -math.log(ratio)


def pareto(mean: float, variance: float, ratio: float) -> float:
    """Generalised Pareto distribution at location 0, by its first two moments.

    xi = (1 - mean^2/variance)/2, sigma = mean (mean^2/variance + 1)/2, eta = sigma (ratio^-xi - 1)/xi.
    At variance = mean^2 it is the exponential distribution.

    >>> pareto(2.0, 4.0, math.exp(-3))
    6.0
    """
    if variance <= 1e-12 * mean * mean:
        return mean
    spread = mean * mean / variance
    xi, sigma = (1 - spread) / 2, mean * (spread + 1) / 2
    t = min(-xi * math.log(ratio), 50.0)  # bounded: for a narrow sample the result is below all of it anyway
    return sigma * -math.log(ratio) * (math.expm1(t) / t if t else 1.0)


def gamma(mean: float, mean_log: float, ratio: float) -> float:
    """Gamma distribution, by the closed-form approximation of its maximum-likelihood shape.

    s = ln mean - mean ln x, a = (3 - s + sqrt((s - 3)^2 + 24 s))/(12 s), eta = (mean/a) Q^-1(a, ratio), with the exact
    inverse of the regularised upper incomplete gamma function Q.
    """
    s = math.log(mean) - mean_log if mean > 0 else 0.0
    if s < 1e-9:
        return mean
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return mean / shape * _inverse_upper_gamma(shape, ratio)


def _inverse_upper_gamma(shape: float, ratio: float) -> float:
    """t with Q(shape, t) = ratio, by bisection in ln t; Q falls from 1 to 0."""
    a = torch.tensor(shape, dtype=torch.float64)

    def q(log_t: float) -> float:
        return float(torch.special.gammaincc(a, torch.tensor(math.exp(log_t), dtype=torch.float64)))

    low, high = -690.0, math.log(shape + 1.0)
    while q(high) > ratio:
        high += 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if q(middle) > ratio else (low, middle)
    return math.exp(high)
