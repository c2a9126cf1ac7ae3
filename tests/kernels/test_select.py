"""Selections: every backend agrees with the torch reference; torch.topk is its oracle."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import every, others, reference
from support.cases import cases
from support.vectors import BROKEN, LONG, SHAPES, SIZES, any_floats, gaussian
from tersegrad.kernels.cpu import _candidates
from tersegrad.kernels.ops import top_k_capacity

GUARD = -7  # what memory next to a result holds before and must hold after


def counts(n):
    return sorted({0, min(1, n), n // 1000, n // 100, n // 3, max(n - 1, 0), n})


def guarded(n):
    return torch.full((n + 16,), GUARD, dtype=torch.int32)


def assert_guards(*buffers):
    for buffer in buffers:
        assert (buffer[:8] == GUARD).all()
        assert (buffer[-8:] == GUARD).all()


# --- top_k


def top_k(kernel, x, k):
    """The selection, after a check that nothing around the two buffers was touched."""
    capacity = top_k_capacity(x.numel(), k)
    indices, candidates = guarded(k), guarded(capacity)
    found = kernel.top_k(x, k, indices[8 : 8 + k], candidates[8 : 8 + capacity])
    assert_guards(indices, candidates)
    assert found != -1 or (indices == GUARD).all()
    return None if found == -1 else indices[8 : 8 + found]


@others("top_k")
@cases(shape=SHAPES, n=SIZES)
def test_top_k_agrees(kernel, shape, n):
    x = SHAPES[shape](n)
    for k in counts(n):
        assert torch.equal(top_k(kernel, x, k), top_k(reference, x, k)), k


@others("top_k")
@cases(shape=SHAPES, k=[1, LONG // 100, LONG // 2])
def test_top_k_of_long_vectors_agrees(kernel, shape, k):
    x = SHAPES[shape](LONG)
    assert torch.equal(top_k(kernel, x, k), top_k(reference, x, k))


@others("top_k")
@settings(max_examples=60, deadline=None)
@given(x=any_floats(), data=st.data())
def test_top_k_agrees_on_anything(kernel, x, data):
    k = data.draw(st.integers(0, x.numel()))
    found, expected = top_k(kernel, x, k), top_k(reference, x, k)
    assert (found is None) == (expected is None) == (not x.isfinite().all())
    assert found is None or torch.equal(found, expected)


@every("top_k")
@cases(shape=SHAPES, k=[1, 100, 5_000])
def test_top_k_has_the_magnitudes_of_torch_topk(kernel, shape, k):
    x = SHAPES[shape](10_007)
    ours = x[top_k(kernel, x, k).long()].abs().sort().values
    assert torch.equal(ours, x.abs().topk(k).values.sort().values)


@every("top_k")
def test_top_k_gives_ties_to_the_lowest_positions(kernel):
    x = torch.tensor([1.0, -2.0, 3.0, 2.0, 2.0, -0.0, 0.0])
    assert top_k(kernel, x, 3).tolist() == [1, 2, 3]
    assert top_k(kernel, x, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert top_k(kernel, torch.ones(100_003), 5).tolist() == [0, 1, 2, 3, 4]


@others("top_k")
def test_top_k_is_exact_when_the_guess_is_wrong(kernel):
    """The CPU kernel's sample is drawn at fixed positions: what lies there, and only there, misleads it."""
    n, k = 400_000, 4_000
    width = _candidates.sample_width(n, k, top_k_capacity(n, k) // 2)
    sampled = torch.tensor([int(_candidates.place_drawn(i, width)) for i in range(n // width)])
    assert 1_000 < sampled.numel() < 2_000
    for inside, outside in ((100.0, 1.0), (0.0, 1.0)):  # guess too high: second pass; too low: overflow
        x = gaussian(n) * outside
        x[sampled] = gaussian(sampled.numel()) * inside
        assert torch.equal(top_k(kernel, x, k), top_k(reference, x, k)), inside


@others("top_k")
@cases(k=[1, 10, 20_000, 300_001])
def test_top_k_is_exact_when_the_scratch_overflows_again_and_again(kernel, k):
    x = torch.cat([torch.zeros(200_000), torch.arange(100_000.0)])[:, None].expand(-1, 3).reshape(-1)
    x[::256] = 0
    assert torch.equal(top_k(kernel, x, k), top_k(reference, x, k))


@every("top_k")
@cases(n=[n for n in SIZES if n], bad=BROKEN)
def test_top_k_refuses_what_is_not_finite(kernel, n, bad):
    for position in {0, n // 2, n - 1}:
        x = gaussian(n)
        x[position] = bad
        assert all(top_k(kernel, x, k) is None for k in counts(n))


@every("top_k")
def test_top_k_refuses_when_nothing_is_finite(kernel):
    x = torch.full((100_003,), math.nan)
    assert all(top_k(kernel, x, k) is None for k in counts(100_003))


@every("top_k")
def test_top_k_says_which_buffer_is_too_short(kernel):
    x, ints = torch.ones(100), torch.empty(1000, dtype=torch.int32)
    with pytest.raises(ValueError, match="between 0 and 100"):
        kernel.top_k(x, 101, ints, ints)
    with pytest.raises(ValueError, match="indices holds 9"):
        kernel.top_k(x, 10, ints[:9], ints)
    with pytest.raises(ValueError, match="top_k_capacity"):
        kernel.top_k(x, 10, ints, ints[:100])


# --- above


def above(kernel, x, threshold, capacity):
    indices = guarded(capacity)
    count = kernel.above(x, threshold, indices[8 : 8 + capacity])
    assert_guards(indices)
    assert (indices[8 + count :] == GUARD).all()
    return count, indices[8 : 8 + min(count, capacity)].tolist()


THRESHOLDS = [-1.0, -1e-50, -0.0, 0.0, 1e-45, 0.1, 1.0, 2.5, 3e38, 1e39, math.inf]


@others("above")
@cases(shape=SHAPES, n=SIZES)
def test_above_agrees_and_stops_at_the_capacity(kernel, shape, n):
    x = SHAPES[shape](n)
    for threshold in (-1.0, 0.0, 1.0, 2.5):
        for capacity in {0, n // 10, n}:
            assert above(kernel, x, threshold, capacity) == above(reference, x, threshold, capacity)


@others("above")
@cases(threshold=[0.0, 2.5], capacity=[1000, LONG])
def test_above_agrees_on_long_vectors(kernel, threshold, capacity):
    x = gaussian(LONG)
    assert above(kernel, x, threshold, capacity) == above(reference, x, threshold, capacity)


@others("above")
@settings(max_examples=60, deadline=None)
@given(x=any_floats(), threshold=st.one_of(st.sampled_from(THRESHOLDS), st.floats(allow_nan=False)))
def test_above_agrees_on_anything(kernel, x, threshold):
    assert above(kernel, x, threshold, 50) == above(reference, x, threshold, 50)


@every("above")
def test_above_is_strict_and_nan_is_above_everything(kernel):
    x = torch.tensor([0.0, 1.0, -1.0, 2.0, -math.inf, math.nan])
    assert above(kernel, x, 1.0, 6) == (3, [3, 4, 5])
    assert above(kernel, x, math.inf, 6) == (1, [5])
    assert above(kernel, x, -1.0, 2) == (6, [0, 1])


@every("above")
def test_a_nan_threshold_is_an_error(kernel):
    with pytest.raises(ValueError, match="NaN"):
        kernel.above(torch.ones(3), math.nan, torch.empty(3, dtype=torch.int32))
