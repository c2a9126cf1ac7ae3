"""Gradients that methods are tried on: heavy-tailed, degenerate and non-finite ones."""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tersegrad.core import Layout

Gradient = Callable[[int, int], Tensor]  # (rank, step) -> flat gradient

LAYOUT = Layout(("a.weight", "a.bias", "b.weight", "c.weight"), ((37, 20), (20,), (50, 31), (3, 5, 3, 3)), seed=7)

DEGENERATE = {
    "empty": torch.zeros(0),
    "one element": torch.tensor([-2.5]),
    "one zero": torch.zeros(1),
    "all zero": torch.zeros(1000),
    "constant": torch.full((1000,), 0.25),
    "all negative": -torch.linspace(0.1, 3.0, 1000),
    "one non-zero": torch.nn.functional.one_hot(torch.tensor(613), 1000).float() * -3.0,
    "denormal": torch.linspace(-1, 1, 1000) * 1e-40,
    "huge": torch.linspace(-1, 1, 1000) * 3.4e38 / 4,
    "largest": torch.full((1000,), torch.finfo(torch.float32).max / 8),
    "tiny length": torch.tensor([1e-3, -4.0, 0.0]),
}

LARGE = Layout(("a.weight", "a.bias", "b.weight"), ((1030, 1024), (1000,), (64, 32, 3, 3)), seed=7)  # as in training

NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def laplace(numel: int) -> Gradient:
    """Heavy-tailed gradients, different for every worker and step, with exact zeros among them."""

    def gradient(rank: int, step: int) -> Tensor:
        return _drawn(numel, rank, step).clone()

    return gradient


@lru_cache(maxsize=64)  # drawing a million of them takes longer than most methods need to reduce them
def _drawn(numel: int, rank: int, step: int) -> Tensor:
    rng = np.random.default_rng([numel, rank, step])
    x = rng.laplace(scale=10.0 ** rng.uniform(-3, 0), size=numel)
    x[rng.random(numel) < 0.05] = 0.0
    return torch.from_numpy(x.astype(np.float32))


GRADIENT = laplace(LAYOUT.numel)


def squares(x: Tensor) -> Tensor:
    """Sums of squares over samples that agree in some elements and contradict each other in others."""
    return x.square() * _agreement(x.numel())


@lru_cache(maxsize=4)
def _agreement(numel: int) -> Tensor:
    return 0.1 + 0.4 * (torch.arange(numel) % 7)


def learning_rate(step: int) -> float:
    """One that drops."""
    return 0.1 * 0.5**step
