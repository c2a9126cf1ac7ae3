"""Ternary digits: all backends bit for bit, five to a byte, and bytes that no digits make refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from support.backends import every, others, reference
from support.cases import cases

OPS = "ternary_scales", "ternary_encode", "ternary_decode_add"
both = every(*OPS)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def scales_of(kernel, x, bucket, clip=math.inf):
    scales = torch.full((-(-x.numel() // bucket) + 4,), 77.0)
    assert kernel.ternary_scales(x, bucket, clip, scales[:-4])
    assert scales[-4:].tolist() == [77.0] * 4
    return scales[:-4]


def encoded(kernel, x, scales, bucket, key=5):
    out = torch.full((-(-x.numel() // 5) + 40,), 77, dtype=torch.uint8)
    kernel.ternary_encode(x, scales, bucket, key, out[:-40])
    assert bool((out[-40:] == 77).all())
    return out[:-40]


@others(*OPS)
@settings(max_examples=100, deadline=None)
@given(
    st_numpy.arrays(np.float32, st.integers(0, 3000), elements=FLOATS),
    st.sampled_from([1, 3, 100, 512, 1280, 5000]),
    st.sampled_from([math.inf, 2.5, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_the_kernel_is_the_reference(kernel, x, bucket, clip, key):
    assert_agrees(kernel, torch.from_numpy(x), bucket, clip, key)


@others(*OPS)
@cases(clip=[math.inf, 2.5])
def test_long_vectors(kernel, clip):
    assert_agrees(kernel, gaussian((1 << 20) + 13), 5000, clip, 7)


def assert_agrees(kernel, x, bucket, clip, key):
    scales = scales_of(kernel, x, bucket, clip)
    assert torch.allclose(scales, scales_of(reference, x, bucket, clip), rtol=2e-7, atol=0)
    data = encoded(kernel, x, scales, bucket, key)
    assert torch.equal(data, encoded(reference, x, scales, bucket, key))
    sums = [gaussian(x.numel()), gaussian(x.numel())]
    for each, acc in zip((kernel, reference), sums, strict=True):
        each.ternary_decode_add(data, scales, bucket, acc, 0.3)
    assert torch.equal(sums[0].view(torch.int32), sums[1].view(torch.int32))


@both
@cases(n=[0, 1, 4, 5, 6, 1279, 1280, 1281, 1284, 1286, 4000])
def test_certain_digits_come_back(kernel, n):
    """-s, 0 and s are drawn with certainty."""
    x = torch.randint(-1, 2, (n,), generator=torch.Generator().manual_seed(n)).float() * 3
    scales = torch.full((-(-n // 100),), 3.0)
    acc = torch.zeros(n)
    kernel.ternary_decode_add(encoded(kernel, x, scales, 100), scales, 100, acc, 1.0)
    assert torch.equal(acc, x)


@both
def test_digits_are_where_the_layout_says(kernel):
    """Byte j of a block of B bytes has the elements j, j + B, ..., j + 4 B as its digits, the first the lowest."""
    n = 1280 + 13
    x = torch.randint(-1, 2, (n,), generator=torch.Generator().manual_seed(3)).float()
    data = encoded(kernel, x, torch.ones(1), n).tolist()
    assert len(data) == 256 + 3
    digits = (x + 1).int().tolist()
    assert data[17] == sum(3**k * digits[17 + 256 * k] for k in range(5))
    assert data[256 + 2] == sum(3**k * digits[i] for k in range(5) if (i := 1280 + 2 + 3 * k) < n)


@both
@cases(byte=[243, 250, 255])
def test_a_byte_above_242_is_refused_before_anything_is_added(kernel, byte):
    for where in (0, 150, 299):
        data = torch.zeros(300, dtype=torch.uint8)
        data[where] = byte
        acc = torch.ones(1500)
        with pytest.raises(ValueError, match=f"0 to 242, got {byte}"):
            kernel.ternary_decode_add(data, torch.ones(1), 1500, acc, 1.0)
        assert bool((acc == 1).all())


@both
def test_every_legal_byte_decodes_to_its_digits(kernel):
    data = torch.arange(243, dtype=torch.uint8)
    acc = torch.zeros(243 * 5)
    kernel.ternary_decode_add(data, torch.ones(1), acc.numel(), acc, 1.0)
    digits = np.array([[byte // 3**k % 3 - 1 for byte in range(243)] for k in range(5)])
    assert np.array_equal(acc.numpy(), digits.reshape(-1))


@both
def test_scales(kernel):
    x = gaussian(1000)
    for bucket in (1, 7, 512, 4000):
        parts = x.split(bucket)
        assert scales_of(kernel, x, bucket).tolist() == [float(p.abs().max()) for p in parts]
        want = [min(float(p.abs().max()), 1.5 * float(p.double().square().mean().sqrt())) for p in parts]
        assert scales_of(kernel, x, bucket, 1.5).tolist() == pytest.approx(want, rel=1e-6)
    assert scales_of(kernel, torch.full((4,), 1e-40), 4).tolist() == [0.0]
    largest = torch.finfo(torch.float32).max
    assert scales_of(kernel, torch.full((512,), largest), 512, 2.5).tolist() == [largest]


@both
@cases(bad=[math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(kernel, bad):
    for where in (0, 511, 512, 999):
        for clip in (math.inf, 2.5):
            x = gaussian(1000)
            x[where] = bad
            assert not kernel.ternary_scales(x, 512, clip, torch.empty(2))


@both
def test_a_scale_of_zero_gives_zeros(kernel):
    data = encoded(kernel, gaussian(1000), torch.zeros(2), 512)
    acc = torch.zeros(1000)
    kernel.ternary_decode_add(data, torch.ones(2), 512, acc, 1.0)
    assert not bool(acc.any())


@both
def test_refusals(kernel):
    x = torch.zeros(10)
    with pytest.raises(ValueError, match="10 elements in buckets of 4 do not have 2 scales"):
        kernel.ternary_scales(x, 4, math.inf, torch.zeros(2))
    with pytest.raises(ValueError, match="10 ternary digits take 2 bytes, not 3"):
        kernel.ternary_encode(x, torch.zeros(1), 10, 0, torch.zeros(3, dtype=torch.uint8))
