"""Sums and counts over a vector: all backends agree with the torch reference; numpy is the oracle."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.backends import every, others, reference
from support.cases import cases
from support.vectors import BROKEN, SHAPES, SIZES, any_floats, gaussian

OPS = "moments", "count_above"
SUMS = "abs_sums", "abs_log_sum"
both = every(*OPS)
THRESHOLDS = [-1.0, -1e-50, -0.0, 0.0, 1e-45, 0.1, 1.0, 2.5, 3e38, 1e39, math.inf]
floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=200)


@both
@given(floats)
def test_moments(kernel, values):
    assert_moments(kernel, np.array(values, np.float32))


@both
def test_moments_of_a_long_vector(kernel):
    assert_moments(kernel, gaussian((1 << 20) + 13).numpy())


def assert_moments(kernel, x):
    wide = x.astype(np.float64)
    got = kernel.moments(torch.from_numpy(x))
    scale = float(np.abs(wide).sum())
    assert got.total == pytest.approx(wide.sum(), abs=1e-12 * scale)
    assert got.abs_total == pytest.approx(scale, rel=1e-12)
    assert got.squares == pytest.approx(np.square(wide).sum(), rel=1e-12)


@both
@cases(bad=[math.nan, math.inf, -math.inf], where=[0, 63, 999])
def test_moments_are_finite_only_if_all_elements_are(kernel, bad, where):
    x = torch.ones(1000)
    x[where] = bad
    assert not any(math.isfinite(sum_) for sum_ in kernel.moments(x))


@others("count_above")
@given(floats, st.floats(-1, 2.0**100, width=32))
def test_count_is_that_of_above(kernel, values, threshold):
    x = torch.tensor(values, dtype=torch.float32)
    want = reference.above(x, threshold, torch.empty(len(values), dtype=torch.int32))
    assert kernel.count_above(x, threshold) == reference.count_above(x, threshold) == want


@both
def test_nan_is_above_every_threshold(kernel):
    assert kernel.count_above(torch.tensor([math.nan, math.inf, 1.0]), 3e38) == 2
    with pytest.raises(ValueError, match="NaN"):
        kernel.count_above(torch.ones(3), math.nan)


# --- all_finite and abs_max


@every("all_finite")
@cases(n=SIZES, bad=BROKEN)
def test_all_finite_finds_one_bad_element_anywhere(kernel, n, bad):
    x = gaussian(n)
    assert kernel.all_finite(x) is True
    for position in {0, n // 2, n - 1} if n else ():
        x[position] = bad
        assert kernel.all_finite(x) is False
        x[position] = 3.4e38
    assert kernel.all_finite(x) is True


@every("abs_max")
@cases(n=SIZES)
def test_abs_max_is_the_largest_or_says_that_one_is_not_finite(kernel, n):
    x = gaussian(n)
    assert kernel.abs_max(x) == (float(x.abs().max()) if n else 0.0)
    for position in {0, n // 2, n - 1} if n else ():
        for bad in BROKEN:
            broken = x.clone()
            broken[position] = bad
            assert not math.isfinite(kernel.abs_max(broken))


# --- abs_sums and abs_log_sum


def assert_sums(found, expected):
    assert found == pytest.approx(expected, rel=1e-12, abs=0, nan_ok=True)


@others(*SUMS)
@cases(shape=SHAPES, n=SIZES)
def test_abs_sums_agree(kernel, shape, n):
    x = SHAPES[shape](n)
    for threshold in THRESHOLDS:
        assert_sums(kernel.abs_sums(x, threshold), reference.abs_sums(x, threshold))


@others(*SUMS)
@given(x=any_floats(), threshold=st.one_of(st.sampled_from(THRESHOLDS), st.floats(allow_nan=False)))
def test_abs_sums_agree_on_anything_and_count_what_is_above(kernel, x, threshold):
    assert_sums(kernel.abs_sums(x, threshold), reference.abs_sums(x, threshold))
    assert kernel.abs_sums(x, threshold)[0] == reference.above(x, threshold, torch.empty(0, dtype=torch.int32))


@others(*SUMS)
@cases(shape=SHAPES, n=SIZES)
def test_abs_log_sum_agrees(kernel, shape, n):
    x = SHAPES[shape](n)
    assert kernel.abs_log_sum(x) == pytest.approx(reference.abs_log_sum(x), abs=1e-5 * n + 1e-9)


@every(*SUMS)
@cases(bad=BROKEN)
def test_sums_are_finite_only_if_every_element_is(kernel, bad):
    x = torch.full((100_003,), -3e38)
    assert all(map(math.isfinite, kernel.abs_sums(x, 1.0)))
    for position in (0, 50_000, 100_002):
        broken = x.clone()
        broken[position] = bad
        assert not any(map(math.isfinite, kernel.abs_sums(broken, 1.0)[1:]))


@every(*SUMS)
def test_a_nan_threshold_is_an_error(kernel):
    with pytest.raises(ValueError, match="NaN"):
        kernel.abs_sums(torch.ones(3), math.nan)
