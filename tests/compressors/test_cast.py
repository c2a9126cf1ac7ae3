"""FP16 and BF16: rounding to nearest as numpy and integers do it, saturation, and sums of bodies."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from support.cases import cases
from tersegrad import BF16, FP16, roundtrip
from tersegrad.core import HEADER_NBYTES, Payload, Summable, accumulate

LARGEST = float(np.finfo(np.float32).max)
FLOATS = st_numpy.arrays(np.float32, st.integers(0, 50), elements=st.floats(-60000, 60000, width=32))


def as_bfloat16(x):
    """Round to nearest, ties to even, on the bits of float32."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@given(FLOATS)
def test_rounded_to_nearest(x):
    assert np.array_equal(roundtrip(BF16(), torch.from_numpy(x))[0].numpy(), as_bfloat16(x))
    half = x.astype(np.float16).astype(np.float32)
    assert np.array_equal(roundtrip(FP16(), torch.from_numpy(x))[0].numpy(), half)


@cases("codec limit", [(FP16(), 61440.0), (BF16(), 1.984375 * 2.0**127)])
def test_what_is_too_large_is_saturated(codec, limit):
    beyond = float(np.nextafter(np.float32(limit), np.float32(np.inf)))
    x = torch.tensor([limit, beyond, 70000.0, 3e38, LARGEST])
    want = [min(v, limit) for v in x.tolist()]
    decoded, payload = roundtrip(codec, torch.cat([x, -x]))
    assert payload.finite
    if codec == FP16():
        assert decoded.tolist() == want + [-v for v in want]
    else:
        assert decoded.tolist() == [*as_bfloat16(np.array(want + [-v for v in want], np.float32)).tolist()]
        assert float(decoded.max()) == limit


@cases(codec=[FP16(), BF16()], workers=[2, 3, 5, 7])
def test_a_mean_of_saturated_values_is_finite(codec, workers):
    """Divided first and added in 16 bits, as an all-reduce does: rounding up must not reach infinity."""
    body = roundtrip(codec, torch.tensor([LARGEST, -LARGEST]))[1].body.view(codec.dtype)
    share = body / workers
    total = share.clone()
    for _ in range(workers - 1):
        total = total + share
    assert bool(total.isfinite().all())


@cases(codec=[FP16(), BF16()], bad=[math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(codec, bad):
    x = torch.ones(70_000)  # more than one block
    x[66_000] = bad
    decoded, _ = roundtrip(codec, x)
    assert (~decoded.isfinite()).nonzero().flatten().tolist() == [66_000]


@cases(codec=[FP16(), BF16()], n=[0, 1, 7, 65_536, 65_537])
def test_two_bytes_an_element_and_nothing_else(codec, n):
    x = torch.linspace(-1, 1, n)
    decoded, payload = roundtrip(codec, x)
    assert (payload.nbytes, payload.meta) == (HEADER_NBYTES + 2 * n, b"")
    assert torch.equal(decoded, x.to(codec.dtype).float())


@cases(codec=[FP16(), BF16()])
def test_bodies_may_be_added(codec):
    """Small integers are exact in both: the sum of the bodies is the body of the sum."""
    assert isinstance(codec, Summable)
    a, b = torch.arange(-60.0, 60.0), torch.arange(120.0).flip(0)
    bodies = [roundtrip(codec, v)[1].body.view(codec.dtype) for v in (a, b, a + b)]
    assert torch.equal(bodies[0] + bodies[1], bodies[2])


@cases(codec=[FP16(), BF16()], scale=[1.0, -1.0, 0.25])
def test_decoding_adds_a_scaled_vector(codec, scale):
    x, acc = torch.linspace(-2, 2, 1000), torch.linspace(5, 6, 1000)
    want = acc + scale * x.to(codec.dtype).float()
    accumulate(codec, roundtrip(codec, x)[1], acc, scale)
    assert torch.equal(acc, want)


def test_the_error_of_bfloat16_is_what_it_states():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1e30
    error = (roundtrip(BF16(), x)[0].double() - x.double()).abs()
    assert bool((error <= 2.0**-8 * x.double().abs()).all())
    assert BF16().traits().error == 2.0**-8


@cases(codec=[FP16(), BF16()])
def test_a_body_of_another_length_is_refused(codec):
    acc = torch.ones(10)
    for nbytes in (0, 19, 22):
        with pytest.raises(ValueError, match=rf"{nbytes}\b"):
            accumulate(codec, Payload(torch.zeros(nbytes, dtype=torch.uint8), 10), acc)
    assert bool((acc == 1).all())
