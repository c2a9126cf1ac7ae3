"""Positions drawn without replacement: every backend agrees with the torch reference, and all are equally likely."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from support.backends import every, others, reference
from support.cases import cases
from tersegrad.core import mix_seed
from tersegrad.kernels.ops import shift_of

both = every("stratified")
fast = others("stratified")


def drawn(kernel, n, k, key):
    positions = torch.full((k,), -1, dtype=torch.int32)
    kernel.stratified(n, key, positions)
    return positions


@fast
@given(st.integers(0, 5000), st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_agrees_with_the_reference(kernel, n, share, key):
    k = round(share * n)
    assert torch.equal(drawn(kernel, n, k, key), drawn(reference, n, k, key))


@fast
def test_agrees_with_the_reference_where_products_are_long(kernel):
    n = 2**31 - 1
    for k in (1, 2, 12_345, 1 << 20):
        assert torch.equal(drawn(kernel, n, k, 2**64 - 1), drawn(reference, n, k, 2**64 - 1)), k


@both
@cases("n k", [(1, 1), (10, 10), (10, 7), (1000, 333), (10_000, 100)])
def test_all_different_and_inside(kernel, n, k):
    positions = drawn(kernel, n, k, 42).tolist()
    assert len(set(positions)) == k
    assert all(0 <= p < n for p in positions)


@both
def test_ascending_but_for_one_place(kernel):
    for key in range(20):
        assert int((drawn(kernel, 1000, 37, key).diff() < 0).sum()) <= 1


@fast
@cases("n k", [(40, 7), (24, 16), (30, 1), (12, 12)])
def test_every_position_is_equally_likely(kernel, n, k):
    """Chi-square over many keys, also where k does not divide n: slices alone would fail there."""
    counts = torch.zeros(n)
    keys = 6000
    for key in range(keys):
        counts[drawn(kernel, n, k, mix_seed(key)).long()] += 1
    if k == n:
        assert bool((counts == keys).all())
    else:
        assert stats.chisquare(counts.double().numpy()).pvalue > 1e-3


@fast
def test_another_key_draws_others(kernel):
    draws = {tuple(drawn(kernel, 1000, 10, key).tolist()) for key in range(100)}
    assert len(draws) == 100


@fast
def test_inside_a_slice_the_draws_are_uniform(kernel):
    """Without the shift: what one draw is, relative to the first of its slice."""
    n, k = 100_000, 1000
    places = []
    for key in range(50):
        shifted = (drawn(kernel, n, k, mix_seed(key)).long() - shift_of(n, mix_seed(key))) % n
        places.append(shifted.sort().values - torch.arange(k) * 100)
    counts = torch.cat(places).bincount(minlength=100)
    assert counts.numel() == 100
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


@both
@cases("n k", [(3, 4), (0, 1), (2**31, 4)])
def test_what_cannot_be_drawn_is_refused(kernel, n, k):
    with pytest.raises(ValueError, match=f"{k} different positions of {n}"):
        kernel.stratified(n, 0, torch.empty(k, dtype=torch.int32))
