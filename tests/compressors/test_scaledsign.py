"""ScaledSign: the nearest vector of its form, exact sizes, and what went wrong elsewhere."""

import math

import pytest
import torch

from tersegrad.compressors import ScaledSign
from tersegrad.core import HEADER_NBYTES, Layout, Payload, accumulate, sections
from tersegrad.engine.roundtrip import roundtrip
from tersegrad.reducers import AllGather
from tersegrad.testing.runs import run
from tersegrad.wrappers import ErrorFeedback


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_decoded_is_the_mean_magnitude_with_the_sign():
    x = gaussian(1000)
    decoded, _ = roundtrip(ScaledSign(), x)
    assert torch.equal(decoded, x.double().abs().mean().float() * x.sign())
    decoded, _ = roundtrip(ScaledSign(bucket=96), x)
    means = torch.cat([p.double().abs().mean().expand(p.numel()) for p in x.split(96)])
    assert torch.allclose(decoded, (means * x.sign()).float(), rtol=2e-7, atol=0)


def test_a_zero_counts_as_its_sign_bit_says():
    decoded, _ = roundtrip(ScaledSign(), torch.tensor([0.0, -0.0, 4.0, -4.0]))
    assert decoded.tolist() == [2.0, -2.0, 2.0, -2.0]


@pytest.mark.parametrize("bucket", [None, 64])
def test_no_other_scale_is_nearer_and_the_bound_of_the_paper_holds(bucket):
    for x in (gaussian(640), torch.eye(640)[3], torch.ones(640)):
        decoded, _ = roundtrip(ScaledSign(bucket), x)
        error = float((decoded - x).double().square().sum())
        assert all(float((f * decoded - x).double().square().sum()) >= error for f in (0.99, 1.01))
        for part, rest in zip(x.split(bucket or 640), (decoded - x).split(bucket or 640), strict=True):
            whole = float(part.double().square().sum())
            want = whole - float(part.double().abs().sum()) ** 2 / part.numel()
            assert float(rest.double().square().sum()) == pytest.approx(want, rel=1e-5, abs=1e-6 * max(whole, 1e-9))


@pytest.mark.parametrize(("n", "bucket"), [(0, None), (1, None), (7, 32), (1000, None), (1000, 96), (1024, 64)])
def test_size_is_exact_one_bit_an_element_not_one_byte(n, bucket):
    """A peer's sign methods put one byte an element on the frame."""
    spec = ScaledSign(bucket)
    _, payload = roundtrip(spec, gaussian(n))
    means = 4 * (math.ceil(n / bucket) if bucket else min(n, 1))
    assert payload.nbytes == HEADER_NBYTES + means + math.ceil(n / 8)
    assert sections(spec, payload) == {"means": means, "codes": math.ceil(n / 8)}


def test_one_nan_does_not_poison_the_memory_of_error_feedback():
    """A peer's memory was NaN throughout (4096 of 4096) after one NaN."""

    def gradient(rank, step):
        x = gaussian(4096, seed=2 * step + rank)
        if step == 1 and rank == 1:
            x[7] = math.nan
        return x

    spec = ErrorFeedback(AllGather(ScaledSign()))
    for trace in run(spec, 2, gradient, Layout.flat(4096)):
        assert bool(trace.means[1].isnan().all())
        assert torch.equal(trace.held[0], trace.held[1])
        assert bool(trace.held[2].isfinite().all())


def test_the_first_step_of_error_feedback_is_like_every_other():
    """A peer's first step leaves a factor out."""

    def gradient(rank, step):
        return gaussian(1000, seed=5)

    (trace,) = run(ErrorFeedback(AllGather(ScaledSign())), 1, gradient, Layout.flat(1000), steps=2)
    total = gaussian(1000, seed=5)
    for step in (0, 1):
        want, _ = roundtrip(ScaledSign(), total)
        assert torch.equal(trace.means[step], want)
        assert torch.equal(trace.held[step], total - want)
        total = trace.held[step] + gaussian(1000, seed=5)


@pytest.mark.parametrize("mean", [math.nan, math.inf, -1.0])
def test_a_mean_that_cannot_be_is_refused_before_anything_is_added(mean):
    _, payload = roundtrip(ScaledSign(), gaussian(10))
    body = payload.body.clone()
    body[:4] = torch.tensor([mean]).view(torch.uint8)
    acc = torch.ones(10)
    with pytest.raises(ValueError, match=r"ScaledSign\(\) is not"):
        accumulate(ScaledSign(), Payload(body, 10), acc)
    assert bool((acc == 1).all())
