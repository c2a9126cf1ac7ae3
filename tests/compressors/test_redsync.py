"""RedSync: k to 2 k elements between mean and maximum, and the vectors on which halving finds none."""

import pytest
import torch

from support.cases import cases
from support.vectors import gaussian
from tersegrad import roundtrip
from tersegrad.compressors import RedSync
from tersegrad.core import Layout


def sent(spec, x):
    decoded, payload = roundtrip(spec, x)
    assert payload.finite
    chosen = decoded != 0
    assert torch.equal(decoded[chosen], x[chosen])
    return int(chosen.sum())


def laplace(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(n).exponential_(generator=generator).copysign_(torch.rand(n, generator=generator) - 0.5)


def in_torch(x, ratio, width):
    """The method, written once more, with the whole vector in float64."""
    magnitude, k = x.double().abs(), max(1, round(ratio * x.numel()))
    mean, top = magnitude.mean(), magnitude.max()
    low, high, eta = 0.0, 1.0, mean
    while high - low > width:
        middle = (low + high) / 2
        eta = mean + middle * (top - mean)
        count = int((magnitude > eta).sum())
        if k <= count <= 2 * k:
            break
        if count < k:
            high = middle
        else:
            low = middle
    return float(eta)


@cases(make=[gaussian, laplace])
@cases(ratio=[0.1, 0.01, 0.001])
def test_between_k_and_2k(make, ratio):
    for seed in range(5):
        assert ratio * 20_000 <= sent(f"RedSync({ratio})", make(20_000, seed)) <= 2 * ratio * 20_000


@cases(make=[gaussian, laplace])
@cases(width=[0.2, 0.001])
@cases(ratio=[0.1, 0.01, 0.001])
def test_the_threshold_is_that_of_the_formula(make, width, ratio):
    x = make(5000, 1)
    method = RedSync(ratio, width=width)
    got = method.threshold(x, method.init(Layout.flat(5000), 0))
    assert got == pytest.approx(in_torch(x, ratio, width), rel=1e-6)


def test_a_coarse_search_may_end_with_too_few():
    """A heavy tail: the thresholds tried at width 0.2 are all far out in it."""
    x = gaussian(20_000) * torch.exp(2 * gaussian(20_000, 1))
    assert 1 <= sent("RedSync(0.05, width=0.2)", x) < 500
    assert 1000 <= sent("RedSync(0.05)", x) <= 2000


def test_a_constant_vector_sends_k():
    assert sent("RedSync(0.05)", torch.full((1000,), -0.25)) == 50


def test_two_values_that_no_count_fits():
    """500 large and 500 small ones: k = 10 is not to be had by any threshold; all of the large ones are sent."""
    x = torch.ones(1000)
    x[::2] = -2.0
    assert sent("RedSync(0.01)", x) == 500


def test_few_elements():
    assert sent("RedSync(0.01)", torch.tensor([1e-3, -4.0, 0.0])) == 1
    assert sent("RedSync(0.01)", torch.tensor([-2.5])) == 1
    assert sent("RedSync(1.0)", torch.tensor([1.0, 2.0])) >= 1
    assert sent("RedSync(0.01)", torch.zeros(0)) == 0


def test_zeros_send_nothing():
    _, payload = roundtrip("RedSync(0.05)", torch.zeros(1000))
    assert payload.body.numel() <= 32


def test_one_spike_is_sent():
    x = torch.zeros(1000)
    x[613] = 1e-42
    assert sent("RedSync(0.05)", x) >= 1


@cases(bad=[float("nan"), float("inf"), float("-inf")])
def test_not_finite(bad):
    x = gaussian(1000)
    x[77] = bad
    _, payload = roundtrip("RedSync(0.05)", x)
    assert not payload.finite


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        RedSync(2.0)
    with pytest.raises(ValueError, match="halvings"):
        RedSync(0.1, width=0.0)
