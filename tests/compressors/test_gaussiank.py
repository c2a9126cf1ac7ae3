"""GaussianK: the quantile of a fitted normal law, its corrections, and vectors that are not normal."""

import pytest
import torch
from scipy import stats

from support.cases import cases
from support.vectors import gaussian
from tersegrad import roundtrip
from tersegrad.compressors import GaussianK
from tersegrad.core import Layout


def sent(spec, x):
    decoded, payload = roundtrip(spec, x)
    assert payload.finite
    chosen = decoded != 0
    assert torch.equal(decoded[chosen], x[chosen])
    return int(chosen.sum())


def threshold(x, ratio):
    method = GaussianK(ratio)
    return method.threshold(x, method.init(Layout.flat(x.numel()), 0))


@cases(ratio=[0.1, 0.01, 0.001, 1e-5])
@cases(scale=[1.0, 1e-20, 1e20])
def test_on_a_normal_vector_the_law_is_right(ratio, scale):
    x = gaussian(100_000) * scale
    want = x.double().mean().abs() + stats.norm.isf(ratio / 2) * x.double().std()
    assert threshold(x, ratio) == pytest.approx(float(want), rel=1e-6)
    if ratio >= 0.001:
        assert 2 / 3 <= sent(f"GaussianK({ratio})", x) / (ratio * 100_000) <= 4 / 3


@cases(ratio=[0.1, 0.01, 0.001])
@cases(seed=range(3))
def test_corrections_are_those_of_the_formula(ratio, seed):
    x = gaussian(20_000, seed) * torch.exp(2 * gaussian(20_000, seed + 10))  # a heavy tail
    magnitude, k = x.double().abs(), max(1, round(ratio * 20_000))
    eta = float(x.double().mean().abs() + stats.norm.isf(ratio / 2) * x.double().std())
    for _ in range(3):
        count = int((magnitude > eta).sum())
        if count < 2 * k / 3:
            eta *= 0.5
        elif count > 4 * k / 3:
            eta *= 1.5
    assert threshold(x, ratio) == pytest.approx(eta, rel=1e-6)


def test_all_negative_is_all_positive_mirrored():
    """A threshold of mean + z * deviation would be below zero here, and let everything pass."""
    x = gaussian(10_000).abs() + 20.0
    assert sent("GaussianK(0.05)", -x) == sent("GaussianK(0.05)", x) < 10_000


def test_a_constant_vector_sends_k():
    assert sent("GaussianK(0.05)", torch.full((1000,), -0.25)) == 50


def test_few_elements():
    assert sent("GaussianK(0.01)", torch.tensor([1e-3, -4.0, 0.0])) == 1
    assert sent("GaussianK(0.01)", torch.tensor([-2.5])) == 1
    assert sent("GaussianK(1.0)", torch.tensor([1.0, 2.0])) >= 1
    assert sent("GaussianK(0.01)", torch.zeros(0)) == 0


def test_zeros_send_nothing():
    _, payload = roundtrip("GaussianK(0.05)", torch.zeros(1000))
    assert payload.body.numel() <= 32


def test_one_spike_is_sent():
    x = torch.zeros(1000)
    x[613] = -1e-42
    assert sent("GaussianK(0.05)", x) >= 1


@cases(bad=[float("nan"), float("inf"), float("-inf")])
def test_not_finite(bad):
    x = gaussian(1000)
    x[77] = bad
    _, payload = roundtrip("GaussianK(0.05)", x)
    assert not payload.finite


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        GaussianK(0.0)
