"""The Fourier transform in pieces, against numpy's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.cases import cases
from support.vectors import gaussian
from tersegrad.compressors.fft.fourier import BLOCK, LIMIT, Run, fast_at_most, forward, inverse, is_fast, split_pieces
from tersegrad.core import pausing


def transform(x, runs):
    even = x.numel() + x.numel() % 2
    bins, magnitudes = torch.full((even,), -7.0), torch.full((even // 2,), -7.0)
    return pausing.run(forward(x, runs, bins, magnitudes)), bins, magnitudes


def oracle(x, runs):
    """numpy's spectra in float64, written as bins."""
    padded = np.append(x.numpy().astype(np.float64), [0.0] * (x.numel() % 2))
    bins = []
    for run in runs:
        pieces = padded[run.start : run.stop].reshape(run.pieces, -1, run.positions)
        half = np.fft.rfft(pieces.transpose(0, 2, 1).reshape(run.pieces, run.length), norm="ortho")
        pairs = np.stack([half.real, half.imag], -1)[:, :-1] * np.sqrt(2)
        pairs[:, 0] = np.stack([half[:, 0].real, half[:, -1].real], -1)
        bins.append(pairs.ravel())
    return np.concatenate(bins)


def test_fast_lengths_are_even_products_of_small_primes():
    assert [n for n in range(40) if is_fast(n)] == [n for n in range(2, 40, 2) if n not in (34, 38)]
    assert is_fast(2**20)
    assert not is_fast(2 * 17)
    assert not is_fast(3 * 5)


@given(st.integers(2, 5000))
def test_fast_at_most(length):
    found = fast_at_most(length)
    assert found <= length
    assert is_fast(found)
    assert not any(is_fast(n) for n in range(found + 1, length + 1))


def test_nothing_is_shorter_than_two():
    with pytest.raises(ValueError, match="the shortest is 2"):
        fast_at_most(1)


@given(start=st.integers(0, 50), count=st.integers(0, 3000), half=st.integers(1, 600), positions=st.integers(1, 9))
def test_pieces_follow_each_other_without_gaps(start, count, half, positions):
    runs = split_pieces(2 * start, 2 * start + 2 * count, fast_at_most(2 * half), positions)
    place = 2 * start
    for run in runs:
        assert run.start == place
        assert is_fast(run.length)
        assert run.length % run.positions == 0
        place = run.stop
    assert place == 2 * start + 2 * count
    assert len(runs) <= 6


def test_a_run_in_blocks_is_the_run():
    run = Run(10, 1000, 576, positions=9)
    blocks = list(run.blocks())
    assert len(blocks) == 3
    assert [b.start for b in blocks[1:]] == [b.stop for b in blocks[:-1]]
    assert (blocks[0].start, blocks[-1].stop) == (run.start, run.stop)
    assert all(b.pieces * b.length <= BLOCK and b.positions == 9 for b in blocks)


RUNS = {
    "one element": (1, split_pieces(0, 2, 64)),
    "three": (3, split_pieces(0, 4, 64)),
    "even": (1000, split_pieces(0, 1000, 64)),
    "odd": (1001, split_pieces(0, 1002, 64)),
    "one piece": (720, split_pieces(0, 720, 720)),
    "many blocks": (300_001, split_pieces(0, 300_002, 1000)),
    "turned": (1153, [Run(0, 8, 144, 9), Run(1152, 1, 2)]),
    "turned and padded": (1151, [Run(0, 8, 144, 9)]),
}
every_split = cases(name=RUNS)


@every_split
def test_spectrum_is_that_of_numpy(name):
    numel, runs = RUNS[name]
    x = gaussian(numel)
    finite, bins, magnitudes = transform(x, runs)
    assert finite
    expected = oracle(x, runs)
    assert np.abs(bins.numpy() - expected).max() < 2e-6
    assert np.abs(magnitudes.numpy() - np.hypot(expected[::2], expected[1::2])).max() < 2e-6
    assert np.isclose(np.square(expected).sum(), np.square(x.numpy().astype(np.float64)).sum())


@every_split
def test_there_and_back(name):
    numel, runs = RUNS[name]
    x = gaussian(numel)
    _, bins, _ = transform(x, runs)
    out = torch.full_like(x, 99.0)
    inverse(bins, runs, out)
    assert float((out - x).abs().max()) < 2e-6
    rest = x.clone()
    inverse(bins, runs, rest, subtract=True)
    assert torch.equal(rest, x - out)
    if numel % 2 == 0:
        inverse(bins, runs, bins)  # in its own memory
        assert torch.equal(bins, out)


@cases(exponent=[-149, -130, -100, -45, 55, 100, 125])
def test_powers_of_two_come_out_of_the_transform_as_they_went_in(exponent):
    runs = split_pieces(0, 1000, 200)
    x = gaussian(1000)
    if exponent == 125:
        x = x / 50  # so that no bin reaches the limit
    if exponent < -126:
        x = (x * 4).round()  # a denormal has few digits
    scaled = x.double() * 2.0**exponent
    assert torch.equal(scaled.float().double(), scaled)
    _, bins, magnitudes = transform(scaled.float(), runs)
    expected = torch.from_numpy(oracle(x, runs)) * 2.0**exponent
    tolerance = 2e-6 * 2.0**exponent * float(x.abs().max()) + 2.0**-149
    assert float((bins.double() - expected).abs().max()) <= tolerance
    assert float((magnitudes.double() - expected.view(-1, 2).norm(dim=1)).abs().max()) <= tolerance
    out = torch.empty(1000)
    inverse(bins, runs, out)
    assert float((out.double() - scaled).abs().max()) <= 4 * tolerance


def test_what_no_float32_holds_is_saturated():
    x = torch.full((1000,), 1e38)
    finite, bins, magnitudes = transform(x, split_pieces(0, 1000, 1000))
    assert finite
    assert bins[0] == magnitudes[0] == LIMIT  # sqrt(1000) * 1e38 would be 3e39
    out = torch.empty(1000)
    inverse(bins, split_pieces(0, 1000, 1000), out)
    assert torch.allclose(out, torch.tensor(LIMIT / 1000**0.5))
    spike = torch.full((1000,), LIMIT)  # in all bins: the vector would be sqrt(2000) times as large in one place
    inverse(spike, split_pieces(0, 1000, 1000), out)
    assert bool(out.isfinite().all())
    assert float(out.abs().max()) == LIMIT


@cases(bad=[float("nan"), float("inf"), -float("inf")])
@cases(where=[0, 500, 299_999, -1])
def test_what_is_not_finite_is_seen_wherever_it_is(bad, where):
    x = gaussian(300_001)
    x[where] = bad
    assert not transform(x, split_pieces(0, 300_002, 1000))[0]


def test_a_sum_that_is_not_finite_stays_so():
    bins = torch.zeros(100)
    bins[3] = float("nan")
    out = torch.zeros(100)
    inverse(bins, split_pieces(0, 100, 100), out)
    assert not bool(out.isfinite().any())


def test_input_is_left_alone():
    for scale in (1.0, 1e-30, 1e30):
        x = gaussian(999) * scale
        before = x.clone()
        transform(x, split_pieces(0, 1000, 90))
        assert torch.equal(x, before)
