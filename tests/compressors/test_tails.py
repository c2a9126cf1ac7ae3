"""Thresholds out of fitted laws, against scipy's distributions and against samples of the laws themselves."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats

from support.cases import cases
from tersegrad.compressors.sidco import tails

RATIOS = (0.1, 0.01, 0.001)
SHARES = (0.9, 0.25, 0.1, 0.01, 1e-3, 1e-6)  # what a stage may be asked for
TOLERANCE = {0.1: 0.03, 0.01: 0.03, 0.001: 0.08}
N = 2_000_000

SHAPES = (0.2, 0.5, 0.8, 1.0, 2.0, 5.0)  # of gamma laws
XIS = (-0.3, 0.05, 0.1, 0.2)  # of Pareto laws; from 1/4 on, the variance of a sample has no variance of its own


def pareto_moments(xi, sigma):
    return sigma / (1 - xi), sigma**2 / ((1 - xi) ** 2 * (1 - 2 * xi))


def gamma_mean_log(shape, scale):
    return scipy.special.digamma(shape) + math.log(scale)


# ---- exact moments: scipy's quantiles ------------------------------------------------------------


@cases(ratio=SHARES)
@cases(mean=[1.0, 3e-5, 7e20])
def test_exponential_is_scipys(mean, ratio):
    assert tails.exponential(mean, ratio) == pytest.approx(scipy.stats.expon.isf(ratio, scale=mean), rel=1e-12)


@cases(ratio=SHARES)
@cases(xi=[-3.0, *XIS, 1e-9, -1e-9, 1e-4, -1e-4, 0.4, 0.49])
def test_pareto_is_scipys(xi, ratio):
    sigma = 0.7
    wanted = scipy.stats.genpareto.isf(ratio, xi, scale=sigma)
    assert tails.pareto(*pareto_moments(xi, sigma), ratio) == pytest.approx(wanted, rel=1e-6)


@cases(ratio=SHARES)
@cases(shape=[0.01, 0.1, *SHAPES, 30.0, 1e4, 1e8])
def test_inverse_upper_gamma_is_scipys(shape, ratio):
    assert tails._inverse_upper_gamma(shape, ratio) == pytest.approx(scipy.stats.gamma.isf(ratio, shape), rel=1e-9)


@cases(ratio=[0.25, 0.1, 0.01, 0.001])
@cases(shape=SHAPES)
def test_gamma_is_scipys_but_for_the_approximate_shape(shape, ratio):
    """The closed-form shape is up to 1.4 % below the most likely one; the threshold is off by less than that."""
    scale = 0.3
    wanted = scipy.stats.gamma.isf(ratio, shape, scale=scale)
    assert tails.gamma(shape * scale, gamma_mean_log(shape, scale), ratio) == pytest.approx(wanted, rel=0.01)


@cases(ratio=[0.25, 0.1, 0.01, 0.001])
@cases(shape=SHAPES)
def test_gamma_is_scipys_exactly_at_its_own_shape(shape, ratio):
    mean, s = 2.0, math.log(shape) - scipy.special.digamma(shape)
    closed_form = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    wanted = scipy.stats.gamma.isf(ratio, closed_form, scale=mean / closed_form)
    assert tails.gamma(mean, math.log(mean) - s, ratio) == pytest.approx(wanted, rel=1e-9)


# ---- samples: as many as asked for are above -----------------------------------------------------


def check_sample(y, estimate):
    for ratio in RATIOS:
        assert np.mean(y > estimate(ratio)) / ratio == pytest.approx(1, abs=TOLERANCE[ratio]), f"ratio {ratio}"


def test_exponential_on_a_sample():
    y = np.random.default_rng(1).exponential(0.02, N)
    check_sample(y, lambda ratio: tails.exponential(y.mean(), ratio))


@cases(xi=XIS)
def test_pareto_on_a_sample(xi):
    y = scipy.stats.genpareto.rvs(xi, scale=0.02, size=N, random_state=np.random.default_rng(2))
    mean, variance = y.mean(), y.var(ddof=1)
    check_sample(y, lambda ratio: tails.pareto(mean, variance, ratio))


@cases(shape=[0.2, 0.5, 0.8, 1.0, 2.0])
def test_gamma_on_a_sample(shape):
    y = np.random.default_rng(3).gamma(shape, 0.02, N)
    y = y[y > 0]
    mean, mean_log = y.mean(), np.log(y).mean()
    check_sample(y, lambda ratio: tails.gamma(mean, mean_log, ratio))


# ---- how they relate -----------------------------------------------------------------------------


@cases(ratio=SHARES)
def test_pareto_is_exponential_where_the_variance_is_the_squared_mean(ratio):
    for mean in (1.0, 0.375, 2.0**-60):
        assert tails.pareto(mean, mean * mean, ratio) == tails.exponential(mean, ratio)


@cases(side=[-1, 1])
def test_pareto_is_smooth_there(side):
    """expm1(t)/t near t = 0 is where a plain exp(t) - 1 would lose all digits."""
    for step in (1e-6, 1e-9, 1e-12, 1e-15):
        near = tails.pareto(1.0, 1.0 + side * step, 0.001)
        assert near == pytest.approx(tails.exponential(1.0, 0.001), rel=10 * step + 1e-15)


@cases(ratio=SHARES)
def test_gamma_is_exponential_at_shape_one(ratio):
    assert tails._inverse_upper_gamma(1.0, ratio) == pytest.approx(tails.exponential(1.0, ratio), rel=1e-12)
    mean = 0.7
    full = tails.gamma(mean, math.log(mean) - np.euler_gamma, ratio)
    assert full == pytest.approx(tails.exponential(mean, ratio), rel=0.02)  # the shape comes out as 0.991


@cases(power=[-100, -7, 1, 40])
@cases(ratio=[0.25, 0.01, 0.001])
def test_thresholds_scale_with_the_sample(power, ratio):
    c = 2.0**power
    assert tails.exponential(0.3 * c, ratio) == c * tails.exponential(0.3, ratio)
    assert tails.pareto(0.3 * c, 0.2 * c * c, ratio) == c * tails.pareto(0.3, 0.2, ratio)
    shifted = tails.gamma(0.3 * c, -1.9 + power * math.log(2), ratio)  # a logarithm is rounded
    assert shifted == pytest.approx(c * tails.gamma(0.3, -1.9, ratio), rel=1e-12)


@cases(
    estimate=[
        lambda ratio: tails.exponential(0.3, ratio),
        lambda ratio: tails.pareto(0.3, 0.02, ratio),
        lambda ratio: tails.pareto(0.3, 0.09, ratio),
        lambda ratio: tails.pareto(0.3, 4.0, ratio),
        lambda ratio: tails.gamma(0.3, -1.3, ratio),
        lambda ratio: tails.gamma(0.3, -5.0, ratio),
    ]
)
def test_fewer_elements_are_above_a_higher_threshold(estimate):
    etas = [estimate(ratio) for ratio in np.geomspace(1e-6, 0.999, 60)]
    assert all(a > b > 0 for a, b in itertools.pairwise(etas))
    assert estimate(1.0) == pytest.approx(0, abs=1e-200)


# ---- degenerate moments --------------------------------------------------------------------------


@cases(ratio=[1e-9, 0.001, 0.25, 0.999999, 1.0])
def test_degenerate_moments_give_a_number(ratio):
    for mean in (0.0, 5e-324, 1e-40, 1.0, 3e38, 1e150):
        assert math.isfinite(tails.exponential(mean, ratio))
        for variance in (0.0, 5e-324, 1e-90, 1e-13 * mean**2, 1e-11 * mean**2, mean**2, 1e12 * mean**2):
            assert math.isfinite(tails.pareto(mean, variance, ratio))
        log = math.log(mean) if mean else -math.inf
        for mean_log in (log + 1e-9, log, log - 1e-12, log - 1e-8, log - 1.0, log - 200.0):
            eta = tails.gamma(mean, mean_log, ratio)
            assert eta >= 0
            assert math.isfinite(eta)


@cases(ratio=[0.001, 0.25, 0.9])
def test_a_sample_without_spread_is_its_own_threshold(ratio):
    for value in (0.0, 1e-40, 2.5, 3e38):
        assert tails.pareto(value, 0.0, ratio) == value
        assert tails.gamma(value, math.log(value) if value else -math.inf, ratio) == value
    assert tails.exponential(0.0, ratio) == 0.0
