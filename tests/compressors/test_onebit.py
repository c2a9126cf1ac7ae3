"""OneBit: two means a group, exact sizes, laws with error feedback, and what went wrong elsewhere."""

import math

import pytest
import torch

from tersegrad.compressors import OneBit
from tersegrad.core import HEADER_NBYTES, Payload, accumulate, sections
from tersegrad.engine.roundtrip import roundtrip
from tersegrad.reducers import AllGather
from tersegrad.testing import reducers
from tersegrad.wrappers import ErrorFeedback


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_the_complement_of_a_byte_is_not_a_logical_not():
    """A peer decodes [-1, -1, 2, 2] to [507, 507, 510, 510], and error feedback hides it."""
    decoded, _ = roundtrip(OneBit(), torch.tensor([-1.0, -1.0, 2.0, 2.0]))
    assert decoded.tolist() == [-1.0, -1.0, 2.0, 2.0]


@pytest.mark.parametrize("bucket", [None, 96, 1024])
def test_decoded_is_the_mean_of_its_sign(bucket):
    x = gaussian(3000) + 0.3
    decoded, _ = roundtrip(OneBit(bucket), x)
    for part, got in zip(x.split(bucket or 3000), decoded.split(bucket or 3000), strict=True):
        for side in (part >= 0, part < 0):
            want = part[side].double().mean()
            assert got[side].unique().numel() == 1
            assert float(got[side][0]) == pytest.approx(float(want), rel=1e-6)
        assert float(got.double().sum()) == pytest.approx(float(part.double().sum()), abs=1e-4)


def test_a_sign_that_no_element_has():
    for x in (torch.ones(100), -torch.ones(100), torch.zeros(100)):
        decoded, payload = roundtrip(OneBit(), x)
        assert torch.equal(decoded, x)
        assert bool(payload.body[:8].view(torch.float32).isfinite().all())


def test_no_other_two_numbers_are_nearer():
    x = gaussian(1000) + 0.2
    decoded, _ = roundtrip(OneBit(), x)
    error = float((decoded - x).double().square().sum())
    for up in (0.99, 1.0, 1.01):
        for down in (0.99, 1.0, 1.01):
            other = decoded * torch.where(x >= 0, up, down)
            assert float((other - x).double().square().sum()) >= error * (1 - 1e-7)


@pytest.mark.parametrize(("n", "bucket"), [(0, 1024), (1, 1024), (7, 32), (1000, None), (1000, 96), (4096, 1024)])
def test_size_is_exact_one_bit_an_element_not_one_byte(n, bucket):
    """A peer's 1-bit method puts one byte an element on the frame."""
    spec = OneBit(bucket)
    _, payload = roundtrip(spec, gaussian(n))
    means = 8 * (math.ceil(n / bucket) if bucket else min(n, 1))
    assert payload.nbytes == HEADER_NBYTES + means + math.ceil(n / 8)
    assert sections(spec, payload) == {"means": means, "codes": math.ceil(n / 8)}


def test_laws_with_error_feedback():
    spec = ErrorFeedback(AllGather(OneBit(bucket=64)))
    reducers.check_telescoping(spec, 3)
    reducers.check_nonfinite(spec, math.nan, 700)
    reducers.check_state(spec)


@pytest.mark.parametrize("means", [(math.nan, 0.0), (0.0, -math.inf), (-1.0, 0.0), (1.0, 1.0)])
def test_means_that_cannot_be_are_refused_before_anything_is_added(means):
    _, payload = roundtrip(OneBit(), gaussian(10))
    body = payload.body.clone()
    body[:8] = torch.tensor(means).view(torch.uint8)
    acc = torch.ones(10)
    with pytest.raises(ValueError, match=r"OneBit\(\)"):
        accumulate(OneBit(), Payload(body, 10), acc)
    assert bool((acc == 1).all())
