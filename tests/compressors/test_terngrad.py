"""TernGrad: unbiased without clipping, of known variance and exact size, and what went wrong elsewhere."""

import math

import pytest
import torch

from tersegrad.compressors import TernGrad
from tersegrad.core import HEADER_NBYTES, Layout, Payload, accumulate, sections
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import decode, roundtrip
from tersegrad.reducers import AllGather
from tersegrad.testing.runs import run
from tersegrad.wrappers import ErrorFeedback


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def draws(spec, x, count, seed=0):
    """What ``count`` encodings of the same vector decode to, one row each."""
    state = spec.init(Layout.flat(x.numel()), seed)
    rows = []
    for _ in range(count):
        rows.append(decode(spec, spec.encode(x, state), state))
        states.commit(state)
    return torch.stack(rows).double()


def scales_of(spec, x):
    """The s of each element."""
    parts = x.double().split(spec.bucket or x.numel())
    return torch.cat([p.abs().max().expand(p.numel()) for p in parts])


@pytest.mark.parametrize("bucket", [None, 64, 100])
def test_the_mean_over_many_draws_is_the_vector_and_the_variance_what_it_should_be(bucket):
    spec, x, count = TernGrad(bucket, clip=None), gaussian(600), 2000
    assert spec.traits().unbiased
    seen, magnitude, s = draws(spec, x, count), x.double().abs(), scales_of(spec, x)
    variance = magnitude * (s - magnitude)
    z = (seen.mean(0) - x.double()).abs() / ((variance / count).sqrt() + 2.0**-22 * s)
    assert float(z.max()) < 5
    assert 0.8 < float(z.square().mean()) < 1.2  # what is measured is noise, and not smaller than it should be
    squares = (seen - x.double()).square().mean(0)
    assert float(squares.sum()) == pytest.approx(float(variance.sum()), rel=0.05)


def test_only_three_numbers_come_out_with_the_sign_of_the_element():
    x = gaussian(1000)
    seen = draws(TernGrad(clip=None), x, 20)
    assert set(seen.abs().unique().tolist()) == {0.0, float(x.abs().max())}
    assert bool((seen * x >= 0).all())


def test_clipping_bounds_s_and_what_is_larger_becomes_it():
    x = gaussian(10_000)
    x[3] = 100.0
    spec = TernGrad(clip=2.5)
    assert not spec.traits().unbiased
    s = 2.5 * float(x.double().square().mean().sqrt())
    seen = draws(spec, x, 10)
    assert float(seen.abs().max()) == pytest.approx(s, rel=1e-6)
    assert bool((seen[:, 3] == seen.abs().max()).all())
    inside = x.abs() < s
    assert float(seen[:, inside].mean()) == pytest.approx(float(x[inside].mean()), abs=5 * s / math.sqrt(10 * 10_000))


def test_a_constant_vector_is_not_clipped_to_nothing():
    """Its standard deviation is zero: so it is the root mean square that counts."""
    decoded, _ = roundtrip(TernGrad(), torch.full((1000,), 0.25))
    assert torch.equal(decoded, torch.full((1000,), 0.25))


@pytest.mark.parametrize(("n", "bucket"), [(0, None), (1, None), (5, None), (6, None), (1000, 100), (100_003, 512)])
def test_size_is_exact_eight_fifths_of_a_bit_not_one_byte(n, bucket):
    """A peer's TernGrad puts one byte an element on the frame."""
    spec = TernGrad(bucket)
    _, payload = roundtrip(spec, gaussian(n))
    scales = 4 * (math.ceil(n / bucket) if bucket else min(n, 1))
    assert payload.nbytes == HEADER_NBYTES + scales + math.ceil(n / 5)
    assert sections(spec, payload) == {"scales": scales, "codes": math.ceil(n / 5)}


def test_draws_change_with_step_and_seed_and_nothing_else():
    x, spec = gaussian(1000), TernGrad()
    first, again, other = (draws(spec, x, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_a_step_that_is_forgotten_is_drawn_again():
    x, spec = gaussian(1000), TernGrad()
    state = spec.init(Layout.flat(1000), 0)
    body = spec.encode(x, state).body.clone()
    states.roll_back(state)
    assert torch.equal(spec.encode(x, state).body, body)


def test_one_nan_does_not_poison_the_memory_of_error_feedback():
    """A peer's memory was NaN throughout (4096 of 4096) after one NaN."""

    def gradient(rank, step):
        x = gaussian(4096, seed=2 * step + rank)
        if step == 1 and rank == 1:
            x[7] = math.nan
        return x

    for trace in run(ErrorFeedback(AllGather(TernGrad(bucket=64))), 2, gradient, Layout.flat(4096)):
        assert bool(trace.means[1].isnan().all())
        assert torch.equal(trace.held[0], trace.held[1])
        assert bool(trace.held[2].isfinite().all())


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0])
def test_a_scale_that_cannot_be_is_refused_before_anything_is_added(scale):
    _, payload = roundtrip(TernGrad(), gaussian(10))
    body = payload.body.clone()
    body[:4] = torch.tensor([scale]).view(torch.uint8)
    acc = torch.ones(10)
    with pytest.raises(ValueError, match=r"TernGrad\(\) is not"):
        accumulate(TernGrad(), Payload(body, 10), acc)
    assert bool((acc == 1).all())


@pytest.mark.parametrize("clip", [0, 0.5, -1.0, math.inf, math.nan, True, "2.5"])
def test_refusals(clip):
    with pytest.raises(ValueError, match=r"1 or more.*Write clip=None for none"):
        TernGrad(clip=clip)
    with pytest.raises(ValueError, match="a whole number of elements"):
        TernGrad(bucket=0)
