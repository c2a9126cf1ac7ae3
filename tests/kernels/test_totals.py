"""Sums and counts over a vector: the CPU kernels agree with their torch reference; numpy is the oracle."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.kernels.cpu import select
from tersegrad.kernels.cpu import totals as cpu
from tersegrad.kernels.reference import totals as reference

both = pytest.mark.parametrize("kernel", [cpu, reference], ids=["cpu", "reference"])
floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=200)


@both
@given(floats)
def test_moments(kernel, values):
    x = np.array(values, np.float32)
    wide = x.astype(np.float64)
    got = kernel.moments(torch.from_numpy(x))
    scale = float(np.abs(wide).sum())
    assert got.total == pytest.approx(wide.sum(), abs=1e-12 * scale)
    assert got.abs_total == pytest.approx(scale, rel=1e-12)
    assert got.squares == pytest.approx(np.square(wide).sum(), rel=1e-12)


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 63, 999])
def test_moments_are_finite_only_if_all_elements_are(kernel, bad, where):
    x = torch.ones(1000)
    x[where] = bad
    assert not any(math.isfinite(sum_) for sum_ in kernel.moments(x))


@given(floats, st.floats(-1, 2.0**100, width=32))
def test_count_is_that_of_above(values, threshold):
    x = torch.tensor(values, dtype=torch.float32)
    want = select.above(x, threshold, torch.empty(len(values), dtype=torch.int32))
    assert cpu.count_above(x, threshold) == reference.count_above(x, threshold) == want


@both
def test_nan_is_above_every_threshold(kernel):
    assert kernel.count_above(torch.tensor([math.nan, math.inf, 1.0]), 3e38) == 2
    with pytest.raises(ValueError, match="NaN"):
        kernel.count_above(torch.ones(3), math.nan)
