"""Stochastic rounding: all backends bit for bit, the draws they share, and levels with scales from outside."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from scipy import stats

from support.backends import every, others, reference
from support.cases import cases
from tersegrad.kernels.ops import NORMS, QSGD_MAX_SCALE, bucket_count, levels_of, packed_nbytes, split_key
from tersegrad.kernels.reference.sampling import uniform

OPS = "bucket_scales", "quantise", "qsgd_encode", "qsgd_decode_add"
both = every(*OPS)
CPU = torch.device("cpu")


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def scales_of(x, bucket, norm="max", kernel=reference):
    scales = torch.full((bucket_count(x.numel(), bucket) + 4,), 77.0)
    assert kernel.bucket_scales(x, bucket, norm, scales[:-4])
    assert scales[-4:].tolist() == [77.0] * 4
    return scales[:-4]


def quantised(x, scales, bucket, levels, key, kernel):
    out = torch.full((x.numel() + 16,), 77, dtype=torch.int32)
    kernel.quantise(x, scales, bucket, levels, key, out[: x.numel()])
    assert bool((out[x.numel() :] == 77).all())
    return out[: x.numel()]


def encoded(x, scales, bucket, bits, key, kernel):
    nbytes = packed_nbytes(x.numel(), bits)
    out = torch.full((nbytes + 40,), 77, dtype=torch.uint8)
    kernel.qsgd_encode(x, scales, bucket, bits, key, out[:nbytes])
    assert bool((out[nbytes:] == 77).all())
    return out[:nbytes]


# --- agreement


@others(*OPS)
@settings(max_examples=120, deadline=None)
@given(
    st_numpy.arrays(
        np.float32, st.integers(0, 1300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    ),
    st.sampled_from([1, 3, 8, 100, 512, 5000]),
    st.integers(2, 16),
    st.integers(0, 2**64 - 1),
)
def test_the_kernel_is_the_reference_bit_for_bit(kernel, x, bucket, bits, key):
    assert_agrees(kernel, torch.from_numpy(x), bucket, bits, key)


@others(*OPS)
def test_long_vectors(kernel):
    for bits in (2, 4, 9):
        assert_agrees(kernel, gaussian((1 << 20) + 13), 512, bits, 3)


def assert_agrees(kernel, x, bucket, bits, key):
    scales = scales_of(x, bucket, kernel=kernel)
    assert torch.equal(scales, scales_of(x, bucket, kernel=reference))
    data = encoded(x, scales, bucket, bits, key, kernel)
    assert torch.equal(data, encoded(x, scales, bucket, bits, key, reference))
    levels = levels_of(bits)
    assert torch.equal(*(quantised(x, scales, bucket, levels, key, each) for each in (kernel, reference)))
    sums = [gaussian(x.numel()), gaussian(x.numel())]
    for each, acc in zip((kernel, reference), sums, strict=True):
        each.qsgd_decode_add(data, scales, bucket, bits, acc, 0.3)
    assert torch.equal(sums[0].view(torch.int32), sums[1].view(torch.int32))


@others(*OPS)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1300), st.sampled_from([1, 7, 512]), st.integers(2, 16), st.integers(0, 2**32))
def test_any_codes_decode_alike_and_finite(kernel, n, bucket, bits, seed):
    data = np.random.default_rng(seed).integers(0, 256, packed_nbytes(n, bits), dtype=np.uint8)
    scales = torch.full((bucket_count(n, bucket),), QSGD_MAX_SCALE)
    sums = [torch.zeros(n), torch.zeros(n)]
    for each, acc in zip((kernel, reference), sums, strict=True):
        each.qsgd_decode_add(torch.from_numpy(data), scales, bucket, bits, acc, 1.0)
    assert torch.equal(*sums)
    assert bool(sums[0].isfinite().all())


@both
def test_packed_codes_are_the_levels(kernel):
    x = gaussian(1000)
    scales = scales_of(x, 100)
    levels = quantised(x, scales, 100, 7, 5, kernel)
    acc = torch.zeros(1000)
    kernel.qsgd_decode_add(encoded(x, scales, 100, 4, 5, kernel), scales, 100, 4, acc, 1.0)
    assert torch.equal(acc, levels * (scales / 7).repeat_interleave(100))


# --- scales


@both
def test_scales(kernel):
    x = gaussian(1000)
    for bucket in (1, 7, 512, 1000, 4000):
        parts = x.split(bucket)
        assert scales_of(x, bucket, "max", kernel).tolist() == [float(p.abs().max()) for p in parts]
        lengths = torch.stack([p.double().norm() for p in parts]).float()
        assert torch.allclose(scales_of(x, bucket, "l2", kernel), lengths, rtol=2e-7, atol=0)


@both
@cases(norm=NORMS)
def test_extreme_scales(kernel, norm):
    largest = torch.finfo(torch.float32).max
    assert scales_of(torch.full((512,), largest), 512, norm, kernel).tolist() == [QSGD_MAX_SCALE]
    assert scales_of(torch.full((4,), 1e-40), 4, norm, kernel).tolist() == [0.0]
    assert scales_of(torch.zeros(0), 4, norm, kernel).tolist() == []


@both
@cases(norm=NORMS, bad=[math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(kernel, norm, bad):
    for where in (0, 511, 512, 999):
        x = gaussian(1000)
        x[where] = bad
        assert not kernel.bucket_scales(x, 512, norm, torch.empty(2))


# --- draws


def test_draws_are_uniform():
    draws = uniform(12345, 1_000_000, CPU).double() / 2**24
    assert 0 <= float(draws.min()) <= float(draws.max()) < 1
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3
    low = (uniform(12345, 1_000_000, CPU) % 256).numpy()
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > 1e-3


@cases(lag=[1, 2, 8, 64, 512])
def test_draws_do_not_know_their_neighbours(lag):
    draws = uniform(7, 200_000, CPU).double()
    assert abs(np.corrcoef(draws[lag:], draws[:-lag])[0, 1]) < 5 / math.sqrt(200_000)


@cases(key=[0, 6, 8, *(7 ^ 1 << bit for bit in range(0, 64, 9))])
def test_draws_do_not_know_those_of_another_key(key):
    mine, theirs = (uniform(k, 200_000, CPU).double() for k in (7, key))
    for a, b in ((mine, theirs), (mine[1:], theirs[:-1]), (mine[:-1], theirs[1:])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / math.sqrt(200_000)


def test_every_key_has_halves_of_its_own():
    keys = {split_key(key) for key in [*range(10_000), *(1 << bit for bit in range(14, 64))]}
    assert len(keys) == 10_050
    assert all(0 <= half < 1 << 32 for pair in keys for half in pair)


# --- levels


@both
def test_whole_steps_are_kept_and_others_go_to_a_neighbour(kernel):
    steps = torch.arange(-7, 8).float()
    scales = torch.tensor([14.0])  # a step of 2
    for key in range(50):
        assert torch.equal(quantised(2 * steps, scales, 15, 7, key, kernel), steps.int())
        between = quantised(2 * steps[:-1] + 0.5, scales, 15, 7, key, kernel)
        assert bool(((between == steps[:-1]) | (between == steps[1:])).all())


@both
def test_beyond_the_scale_is_its_end(kernel):
    x = torch.tensor([5.0, -5.0, 3e38, -3e38])
    assert quantised(x, torch.tensor([1.0]), 4, 3, 0, kernel).tolist() == [3, -3, 3, -3]
    assert quantised(x, torch.tensor([1e-30]), 4, 3, 0, kernel).tolist() == [3, -3, 3, -3]


@both
def test_a_scale_of_zero_gives_zeros(kernel):
    for key in range(20):
        assert quantised(gaussian(1000), torch.zeros(2), 512, 7, key, kernel).tolist() == [0] * 1000


@both
def test_levels_of_several_workers_add_up_under_shared_scales(kernel):
    xs = [gaussian(2048, seed) for seed in range(4)]
    scales = torch.stack([scales_of(x, 512) for x in xs]).amax(0)
    total = sum(quantised(x, scales, 512, 127, seed, kernel) for seed, x in enumerate(xs))
    decoded = total * (scales / 127).repeat_interleave(512)
    step = float(scales.max()) / 127
    assert float((decoded - sum(xs)).abs().max()) < 4 * step


@both
def test_refusals(kernel):
    x, scales, out = torch.zeros(10), torch.zeros(2), torch.zeros(10, dtype=torch.int32)
    with pytest.raises(ValueError, match="10 elements in buckets of 4 do not have 2 scales"):
        kernel.quantise(x, scales, 4, 7, 0, out)
    with pytest.raises(ValueError, match="buckets of 0"):
        kernel.bucket_scales(x, 0, "max", scales)
    with pytest.raises(ValueError, match="the norms are"):
        kernel.bucket_scales(x, 5, "l1", scales)
    with pytest.raises(ValueError, match="1 to 32767 levels, not 0"):
        kernel.quantise(x, scales, 5, 0, 0, out)
    with pytest.raises(ValueError, match="a key has 64 bits"):
        kernel.quantise(x, scales, 5, 7, -1, out)
    with pytest.raises(ValueError, match="10 codes of 4 bits take 5 bytes, not 4"):
        kernel.qsgd_encode(x, scales, 5, 4, 0, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="10 codes of 4 bits take 5 bytes, not 4"):
        kernel.qsgd_decode_add(torch.zeros(4, dtype=torch.uint8), scales, 5, 4, x, 1.0)


@both
def test_nothing_is_written_beyond_a_short_out(kernel):
    with pytest.raises(ValueError, match="capacity of 9"):
        kernel.quantise(torch.zeros(10), torch.zeros(2), 5, 7, 0, torch.zeros(9, dtype=torch.int32))
