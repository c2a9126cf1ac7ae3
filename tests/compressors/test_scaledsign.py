"""ScaledSign: the nearest vector of its form, exact sizes, and what went wrong elsewhere."""

import math

import torch

from support.cases import cases
from support.quantisers import check_refused_number
from support.vectors import gaussian
from tersegrad.compressors import ScaledSign
from tersegrad.engine.roundtrip import roundtrip


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


@cases(mean=[math.nan, math.inf, -1.0])
def test_a_mean_that_cannot_be_is_refused_before_anything_is_added(mean):
    check_refused_number(ScaledSign(), mean, r"ScaledSign\(\)(: a mean magnitude must not be| received a number)")
