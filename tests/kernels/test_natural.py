"""Random rounding to powers of two: all backends bit for bit, against frexp, and the ends of float32."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from support.backends import every, others, reference
from support.cases import cases

OPS = "natural_encode", "natural_decode_add"
both = every(*OPS)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def encoded(kernel, x, key=5):
    nbytes = x.numel() + -(-x.numel() // 8)
    out = torch.full((nbytes + 40,), 77, dtype=torch.uint8)
    assert kernel.natural_encode(x, key, out[:nbytes])
    assert bool((out[nbytes:] == 77).all())
    return out[:nbytes]


def decoded(kernel, x, key=5):
    acc = torch.zeros_like(x)
    kernel.natural_decode_add(encoded(kernel, x, key), acc, 1.0)
    return acc


@others(*OPS)
@settings(max_examples=100, deadline=None)
@given(st_numpy.arrays(np.float32, st.integers(0, 2500), elements=FLOATS), st.integers(0, 2**64 - 1))
def test_the_kernel_is_the_reference_and_goes_to_a_neighbouring_power(kernel, x, key):
    assert_agrees(kernel, torch.from_numpy(x), key)


@others(*OPS)
def test_long_vectors(kernel):
    assert_agrees(kernel, gaussian((1 << 20) + 13), 7)


def assert_agrees(kernel, x, key):
    data = encoded(kernel, x, key)
    assert torch.equal(data, encoded(reference, x, key))
    sums = [gaussian(x.numel()), gaussian(x.numel())]
    for each, acc in zip((kernel, reference), sums, strict=True):
        each.natural_decode_add(data, acc, 0.3)
    assert torch.equal(sums[0].view(torch.int32), sums[1].view(torch.int32))
    got = decoded(kernel, x, key).double()
    below = torch.ldexp(torch.ones_like(got), torch.frexp(x.double().abs())[1] - 1)  # the power of two at or below |x|
    below = torch.where(x.abs() < 2.0**-126, 0.0, below)
    above = torch.where(below < 2.0**127, 2 * below, below)
    assert bool(((got.abs() == below) | (got.abs() == above)).all())
    assert bool((got * x.double() >= 0).all())


@both
def test_powers_of_two_and_zero_are_exact(kernel):
    powers = 2.0 ** torch.arange(-126, 128).float()
    x = torch.cat([powers, -powers, torch.zeros(3)])
    for key in range(20):
        assert torch.equal(decoded(kernel, x, key), x)


@both
def test_nothing_finite_becomes_infinite_and_denormals_become_zero(kernel):
    x = torch.tensor([torch.finfo(torch.float32).max, -(2.0**127) * 1.5, 1e-40, -1e-45, 2.0**-126 * 1.25])
    seen = torch.stack([decoded(kernel, x, key) for key in range(64)])
    assert seen[:, 0].unique().tolist() == [2.0**127]
    assert seen[:, 1].unique().tolist() == [-(2.0**127)]
    assert not bool(seen[:, 2:4].any())
    assert seen[:, 4].unique().tolist() == [2.0**-126, 2.0**-125]


@both
def test_the_chance_of_going_up_is_the_mantissa(kernel):
    n = 200_000
    for m in (0.0, 0.01, 1 / 3, 0.5, 0.99):
        up = (decoded(kernel, torch.full((n,), 4 * (1 + m))) == 8).double().mean()
        assert float(up) == pytest.approx(m, abs=5 * math.sqrt(m * (1 - m) / n) + 2.0**-23)


@both
def test_any_bytes_decode_to_something_finite(kernel):
    data = torch.full((9,), 255, dtype=torch.uint8)
    acc = torch.zeros(8)
    kernel.natural_decode_add(data, acc, 1.0)
    assert acc.tolist() == [-(2.0**127)] * 8


@both
@cases(bad=[math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(kernel, bad):
    for where in (0, 511, 1024, 1999):
        x = gaussian(2000)
        x[where] = bad
        assert not kernel.natural_encode(x, 0, torch.empty(2250, dtype=torch.uint8))


@both
def test_refusals(kernel):
    with pytest.raises(ValueError, match="10 elements take 12 bytes, not 11"):
        kernel.natural_encode(torch.zeros(10), 0, torch.zeros(11, dtype=torch.uint8))
