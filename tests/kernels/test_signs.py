"""Signs as bits with means of groups: all backends alike, against numpy's own packing of bits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from support.backends import every, others, reference
from support.cases import cases

OPS = "scaled_sign_encode", "one_bit_encode", "signs_decode_add", "break_ties"
ENCODERS = OPS[:2]
both = every(*OPS)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = st_numpy.arrays(np.float32, st.integers(0, 2500), elements=FLOATS)
BUCKETS = st.sampled_from([32, 96, 512, 1024, 4096])


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def encoded(kernel, name, x, bucket):
    """Means and signs; memory behind both stays as it is."""
    count = -(-x.numel() // bucket) * (2 if name == "one_bit_encode" else 1)
    means, out = torch.full((count + 4,), 77.0), torch.full((-(-x.numel() // 8) + 40,), 77, dtype=torch.uint8)
    assert getattr(kernel, name)(x, bucket, means[:-4], out[:-40])
    assert means[-4:].tolist() == [77.0] * 4
    assert bool((out[-40:] == 77).all())
    return means[:-4], out[:-40]


@others(*OPS)
@settings(max_examples=80, deadline=None)
@given(VECTORS, BUCKETS, st.sampled_from(ENCODERS))
def test_the_kernel_is_the_reference_and_signs_are_numpys_bits(kernel, x, bucket, name):
    assert_agrees(kernel, torch.from_numpy(x), bucket, name)


@others(*OPS)
@cases(name=ENCODERS)
def test_long_vectors(kernel, name):
    assert_agrees(kernel, gaussian((1 << 20) + 13), 4096, name)


def assert_agrees(kernel, x, bucket, name):
    (means, out), (their_means, their_out) = (encoded(each, name, x, bucket) for each in (kernel, reference))
    assert torch.equal(out, their_out)
    assert out.tolist() == np.packbits(np.signbit(x.numpy()), bitorder="little").tolist()
    assert torch.allclose(means, their_means, rtol=2e-7, atol=0)  # sums are taken in another order


@others(*OPS)
@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2500), BUCKETS, st.integers(0, 2**32))
def test_any_signs_are_added_bit_for_bit_alike(kernel, n, bucket, seed):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2, n, dtype=np.uint8)
    data = torch.from_numpy(np.packbits(bits, bitorder="little"))
    values = torch.from_numpy(rng.normal(size=2 * -(-n // bucket)).astype(np.float32))
    sums = [gaussian(n), gaussian(n)]
    for each, acc in zip((kernel, reference), sums, strict=True):
        each.signs_decode_add(data, values, bucket, acc, 0.3)
    assert torch.equal(sums[0].view(torch.int32), sums[1].view(torch.int32))
    group = np.arange(n) // bucket
    terms = np.float32(0.3) * values.numpy()[2 * group + bits]
    assert np.array_equal(sums[0].numpy(), gaussian(n).numpy() + terms)


@both
def test_signs_decode_at_any_address_and_touch_nothing_else(kernel):
    data = torch.randint(0, 256, (40,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for offset in (1, 3):
        big = torch.full((250 + 64,), 77.0)
        kernel.signs_decode_add(data[offset : offset + 32], torch.tensor([1.0, -1.0]), 256, big[32:-32], 1.0)
        assert bool((torch.cat([big[:32], big[-32:]]) == 77).all())
        assert set(big[32:-32].tolist()) == {76.0, 78.0}


@both
@cases(name=ENCODERS, bad=[math.nan, math.inf, -math.inf, -math.nan])
def test_what_is_not_finite_is_seen(kernel, name, bad):
    for where in (0, 511, 512, 999):
        x = gaussian(1000)
        x[where] = bad
        means = torch.empty(4 if name == "one_bit_encode" else 2)
        assert not getattr(kernel, name)(x, 512, means, torch.empty(125, dtype=torch.uint8))


@both
def test_sums_of_the_largest_floats_are_finite(kernel):
    largest = torch.finfo(torch.float32).max
    x = torch.full((1000,), largest)
    assert encoded(kernel, "scaled_sign_encode", x, 1024)[0].tolist() == [largest]
    x[::2] *= -1
    assert encoded(kernel, "one_bit_encode", x, 1024)[0].tolist() == [largest, -largest]


@both
def test_ties_are_broken_each_way_as_often_and_nothing_else_changes(kernel):
    n = 100_000
    votes = torch.zeros(n)
    kernel.break_ties(votes, 11)
    assert set(votes.tolist()) == {-1.0, 1.0}
    assert abs(float(votes.sum())) < 5 * math.sqrt(n)
    again, other = torch.zeros(n), torch.zeros(n)
    kernel.break_ties(again, 11)
    kernel.break_ties(other, 12)
    assert torch.equal(votes, again)
    assert abs(float((votes * other).sum())) < 5 * math.sqrt(n)
    decided = torch.tensor([2.0, -4.0, 2.0])
    kernel.break_ties(decided, 11)
    assert decided.tolist() == [2.0, -4.0, 2.0]


@others(*OPS)
@cases(n=[5000, 1 << 20])
def test_ties_are_broken_alike(kernel, n):
    votes = torch.randint(-1, 2, (n,), generator=torch.Generator().manual_seed(1)).float()
    pair = votes.clone(), votes.clone()
    kernel.break_ties(pair[0], 3)
    reference.break_ties(pair[1], 3)
    assert torch.equal(*pair)
    assert torch.equal(pair[0][votes != 0], votes[votes != 0])


@both
def test_refusals(kernel):
    x, out = torch.zeros(100), torch.zeros(13, dtype=torch.uint8)
    with pytest.raises(ValueError, match="100 elements in groups of 64 do not have 1 means"):
        kernel.scaled_sign_encode(x, 64, torch.zeros(1), out)
    with pytest.raises(ValueError, match="multiple of 32"):
        kernel.scaled_sign_encode(x, 50, torch.zeros(2), out)
    with pytest.raises(ValueError, match="100 signs take 13 bytes, not 12"):
        kernel.signs_decode_add(out[:12], torch.zeros(2), 128, x, 1.0)
