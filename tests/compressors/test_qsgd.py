"""QSGD as a compressor: unbiased, of bounded variance and exact size, drawn anew at every step."""

import math

import pytest
import torch

from support.cases import cases
from support.quantisers import (
    check_draws,
    check_nonfinite,
    check_refused_number,
    check_rolled_back_draws,
    draws,
)
from support.vectors import gaussian
from tersegrad.compressors import QSGD
from tersegrad.core import Payload, accumulate
from tersegrad.engine.roundtrip import roundtrip


def steps_of(spec, x):
    """The step of each element."""
    parts = x.double().split(spec.bucket)
    scales = torch.stack([p.abs().max() if spec.norm == "max" else p.norm() for p in parts])
    return (scales / (2 ** (spec.bits - 1) - 1)).repeat_interleave(spec.bucket)[: x.numel()]


SPECS = [QSGD(), QSGD(bits=2, bucket=64), QSGD(bits=8, bucket=100), QSGD(bits=3, norm="l2"), QSGD(bits=16, bucket=7)]
every_spec = cases(spec=SPECS)


def test_errors_of_two_workers_are_not_the_same():
    x, spec = gaussian(20_000), QSGD(4)
    a, b = (draws(spec, x, 1, seed)[0] - x.double() for seed in (1, 2))
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(20_000)


# --- what cannot be


def test_a_payload_decodes_at_any_address():
    x = gaussian(1000)
    decoded, payload = roundtrip(QSGD(4), x)
    for offset in range(1, 4):
        moved = torch.cat([torch.zeros(offset, dtype=torch.uint8), payload.body])[offset:]
        acc = torch.zeros(1000)
        accumulate(QSGD(4), Payload(moved, 1000), acc)
        assert torch.equal(acc, decoded)


def test_a_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"10 elements of QSGD\(\) take 9 bytes, got 8"):
        accumulate(QSGD(), Payload(torch.zeros(8, dtype=torch.uint8), 10), torch.zeros(10))


@cases(
    "arguments message",
    [
        ({"bits": 1}, "2 to 16 bits, of which one is the sign"),
        ({"bits": 17}, "2 to 16"),
        ({"bits": True}, "2 to 16"),
        ({"bucket": 0}, "one element or more"),
        ({"bucket": 12.5}, "one element or more"),
        ({"norm": "l1"}, "the norms are 'max', 'l2'"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        QSGD(**arguments)


def test_draws_change_with_step_and_seed_and_a_step_that_is_rolled_back_is_drawn_again():
    check_draws(QSGD(4))
    check_rolled_back_draws(QSGD(4))


@every_spec
def test_what_is_not_finite_has_no_body(spec):
    check_nonfinite(spec)


@cases(scale=[math.nan, math.inf, -1.0, 3.4028234e38])
def test_a_scale_that_cannot_be_is_refused_before_anything_is_added(scale):
    check_refused_number(QSGD(4, bucket=4), scale, "a scale is from 0 to", at=4)
