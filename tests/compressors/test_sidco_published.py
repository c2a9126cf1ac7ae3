"""SIDCo(rule="paper") against the released rule, written from its description in NumPy and SciPy."""

import math

import numpy as np
import pytest
import scipy.special
import torch

from tersegrad.compressors import SIDCo
from tersegrad.core import Layout, state

RATIOS = (0.1, 0.01, 0.001)


def released_threshold(x, ratio, law, stages, first=0.25):
    """The whole vector, divided by its norm; exact inverse of the gamma law; locations are smallest exceedances."""
    norm = np.linalg.norm(x)
    y = np.abs(x) / norm
    single = stages == 1 or ratio >= first
    delta = ratio if single else first
    mean, variance = y.mean(), y.var(ddof=1)
    if law == "exponential":
        eta = mean * math.log(1 / delta)
    elif law == "gamma":
        s = math.log(mean) - np.log(y + 2.2e-16).mean()
        shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
        eta = mean / shape * scipy.special.gammaincinv(shape, 1 - delta)
    else:
        eta = genpareto(mean, variance, delta)
    for _ in range(0 if single else stages - 1):
        left = y[y > eta]
        location, share = left.min(), (ratio / first) ** (1 / (stages - 1))
        if law == "exponential":
            eta = location + (left.mean() - location) * math.log(1 / share)
        else:
            eta = location + genpareto(left.mean() - location, left.var(ddof=1), share)
    return norm * eta


def genpareto(mean, variance, delta):
    k, alpha = -(1 - mean**2 / variance) / 2, mean * (mean**2 / variance + 1) / 2
    return alpha * (1 - math.exp(k * math.log(delta))) / k


def gradient(kind, seed, n=100_000):
    rng = np.random.default_rng([seed, n])
    drawn = {
        "laplace": lambda: rng.laplace(size=n),
        "normal": lambda: rng.normal(size=n),
        "student": lambda: rng.standard_t(3, size=n),
        "layers": lambda: rng.normal(size=n) * np.repeat(np.exp(rng.normal(size=50)), n // 50),
        "with zeros": lambda: rng.laplace(size=n) * (rng.random(n) > 0.1),
    }[kind]()
    return (1e-3 * drawn).astype(np.float32)


@pytest.mark.parametrize("kind", ["laplace", "normal", "student", "layers", "with zeros"])
@pytest.mark.parametrize("law", ["exponential", "gamma", "pareto"])
def test_counts_are_those_of_the_released_rule(kind, law):
    x = gradient(kind, 0)
    for ratio in RATIOS:
        for stages in (1, 2, 3, 5):
            compressor = SIDCo(ratio, law=law, stages=stages, rule="paper")
            chosen = compressor.select(torch.from_numpy(x), compressor.init(Layout.flat(x.size), 0))
            want = int((np.abs(x) > released_threshold(x.astype(np.float64), ratio, law, stages)).sum())
            assert abs(chosen.numel() - want) <= max(1, 0.001 * want), (ratio, stages)


@pytest.mark.parametrize("ratio", RATIOS)
def test_stages_are_adapted_every_five_steps_from_one(ratio):
    """With error feedback, beside the released rule: the same number of stages in every step."""
    n, most = 20_000, math.ceil(math.log(ratio) / math.log(0.5))
    compressor = SIDCo(ratio, rule="paper")
    kept = compressor.init(Layout.flat(n), 0)
    residual, stages, told, path = np.zeros(n, np.float32), 1, [], []
    for step in range(100):
        total = residual + gradient("layers", step, n)
        assert kept["stages"] == stages
        chosen = compressor.select(torch.from_numpy(total), kept)
        state.commit(kept)
        passed = np.abs(total) > released_threshold(total.astype(np.float64), ratio, "exponential", stages)
        assert abs(chosen.numel() - passed.sum()) <= 1
        told.append(chosen.numel() / max(1, int(ratio * n)))
        residual = total.copy()
        residual[chosen.numpy()] = 0.0
        if len(told) == 5:
            mean, told = np.mean(told), []
            stages = min(max(stages + (mean < 0.8) - (mean > 1.2), 1), most)
        path.append(stages)
    assert len(set(path)) > 1, "nothing was adapted"


@pytest.mark.parametrize(
    "values", [[0.0] * 9, [1.0] * 9, [0.0] * 8 + [3.0], [2.0], [], [math.nan, 1.0], [math.inf] * 3]
)
@pytest.mark.parametrize("law", ["exponential", "gamma", "pareto"])
def test_degenerate_vectors(values, law):
    x = torch.tensor(values)
    for stages in (1, 3):
        compressor = SIDCo(0.1, law=law, stages=stages, rule="paper")
        chosen = compressor.select(x, compressor.init(Layout.flat(len(values)), 0))
        if x.isfinite().all():
            assert chosen is not None
        else:
            assert chosen is None


def test_another_rule_is_refused():
    with pytest.raises(ValueError, match="the rules are 'ours', 'paper'"):
        SIDCo(0.1, rule="mine")
