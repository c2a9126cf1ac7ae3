"""The largest bins, block by block: all backends find what comparing all bins finds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.backends import every, reference
from support.cases import cases
from tersegrad.kernels import ops

OPS = "collect_bins", "choose_bins"
both = every(*OPS)


def spectra(pieces, length, seed=0, scale=1.0):
    x = torch.randn(pieces, length, generator=torch.Generator().manual_seed(seed)) * scale
    return torch.fft.rfft(x, norm="ortho")


def collected(kernel, half, k, low=0, blocks=1, room=None):
    count = half.shape[0] * (half.shape[1] - 1)
    room = room or ops.bin_capacity(count, k)
    progress = torch.tensor([0, low, 0])
    candidates = torch.empty(room, dtype=torch.int32), torch.empty(room, dtype=torch.int32), torch.empty(2 * room)
    place = 0
    for block in half.chunk(blocks):
        kernel.collect_bins(block.contiguous(), place, k, progress, *candidates)
        place += block.shape[0] * (block.shape[1] - 1)
    found = int(kernel.choose_bins(k, progress, *candidates))
    return found, candidates[0][:k], candidates[2][: 2 * k]


def compared(half, k):
    """All bins, and a stable sort of their magnitudes."""
    count = half.shape[0] * (half.shape[1] - 1)
    bins, magnitudes = torch.empty(2 * count), torch.empty(count)
    reference.fold(half, bins, magnitudes)
    best = torch.argsort(magnitudes, descending=True, stable=True)[:k].sort().values
    return best.int(), bins.view(-1, 2)[best].flatten(), magnitudes


@both
@given(
    pieces=st.integers(1, 40),
    half_length=st.integers(1, 150),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
    blocks=st.integers(1, 4),
    guess=st.floats(0, 1),
)
def test_the_largest_are_found_whatever_the_threshold_lets_pass(
    kernel, pieces, half_length, share, seed, blocks, guess
):
    half = spectra(pieces, 2 * half_length, seed)
    bins = pieces * half_length
    k = max(1, round(share * bins))
    positions, values, magnitudes = compared(half, k)
    low = int((guess * magnitudes.sort(descending=True).values[k - 1]).view(torch.int32))
    found, got, numbers = collected(kernel, half, k, low, blocks)
    assert found == k
    assert torch.equal(got, positions)
    assert torch.equal(numbers, values)


@both
@cases(length=[2, 576, 4096, 5000])
def test_too_many_candidates_are_thinned_out_on_the_way(kernel, length):
    half = spectra(60_000 // length, length)
    k = 100
    positions, values, _ = compared(half, k)
    found, got, numbers = collected(kernel, half, k, blocks=5, room=k + ops.BINS_AT_ONCE)
    assert found == k
    assert torch.equal(got, positions)
    assert torch.equal(numbers, values)


@both
def test_among_equals_the_lowest_win(kernel):
    half = torch.zeros(7, 33, dtype=torch.complex64)
    half[:, 5] = 3 - 4j
    half[:, 9] = 4 + 3j
    for room in (None, 6 + ops.BINS_AT_ONCE):
        found, got, _ = collected(kernel, half, 6, blocks=7, room=room)
        assert (found, got.tolist()) == (6, [5, 9, 37, 41, 69, 73])
    found, got, _ = collected(kernel, torch.zeros(3, 5, dtype=torch.complex64), 4)
    assert (found, got.tolist()) == (4, [0, 1, 2, 3])


@both
def test_a_threshold_that_is_too_high_is_said(kernel):
    half = spectra(10, 64)
    _, _, magnitudes = compared(half, 1)
    low = magnitudes.sort(descending=True).values[19]
    found, _, _ = collected(kernel, half, 50, int(low.view(torch.int32)))
    assert found == 20


@both
@cases(exponent=[-149, -60, 70, 120])
def test_what_cannot_be_squared_is_said(kernel, exponent):
    half = spectra(10, 64)
    half[3] *= 2.0**-149 if exponent == -149 else 1.0
    scaled = half * 2.0**exponent
    assert collected(kernel, scaled, 5)[0] == -1
    assert collected(kernel, half, 5)[0] == 5


@both
@cases(bad=[float("nan"), float("inf")])
@cases(where=[(0, 0), (4, 32), (9, 31)])
def test_what_is_not_finite_is_said(kernel, bad, where):
    half = spectra(10, 64)
    half[where] = complex(bad, 0.0)
    assert collected(kernel, half, 5)[0] == -1
    assert collected(kernel, half, 5, low=0x7F000000)[0] == -1


@both
def test_candidates_that_do_not_fit_are_refused(kernel):
    half, progress = spectra(2, 64), torch.zeros(3, dtype=torch.int64)
    room = 5 + ops.BINS_AT_ONCE
    positions, keys, values = (*torch.empty(2, room, dtype=torch.int32).unbind(), torch.empty(2 * room))
    with pytest.raises(ValueError, match="at least 1030"):
        kernel.collect_bins(half, 0, 6, progress, positions, keys, values)
    with pytest.raises(ValueError, match="two numbers each"):
        kernel.collect_bins(half, 0, 5, progress, positions, keys, values[:-2])
    with pytest.raises(ValueError, match="three int64"):
        kernel.collect_bins(half, 0, 5, progress[:2], positions, keys, values)
    with pytest.raises(ValueError, match="k must be between"):
        ops.bin_capacity(5, 6)
