"""Strom's threshold: signs of what exceeds it."""

import pytest
import torch

from support.cases import cases
from tersegrad import roundtrip
from tersegrad.core import Layout
from tersegrad.specs import parse
from tersegrad.testing import inputs, runs


def test_sends_the_sign_of_what_exceeds_tau():
    x = torch.tensor([0.5, -0.5, 0.51, -3.0, 0.0])
    decoded, _ = roundtrip("Strom(0.5)", x)
    assert decoded.tolist() == [0.0, 0.0, 0.5, -0.5, 0.0]


def test_a_bit_and_an_index_an_element():
    x = torch.zeros(80_000)
    x[::80] = 1.0
    _, payload = roundtrip("Strom(0.5)", x)
    assert payload.body.numel() < 1000 * (1 + 8.2) / 8 + 64  # 1 bit for the sign, 8.1 for the index at this density


def test_total_of_signs_and_rest_is_the_total_of_gradients():
    traces = runs.run(
        parse("ErrorFeedback(AllGather(Strom(0.25)))"), 1, inputs.laplace(500), Layout.flat(500), steps=20
    )
    sent = torch.stack(traces[0].means)
    assert set(sent.unique().tolist()) <= {-0.25, 0.0, 0.25}
    total = torch.stack(traces[0].gradients).double().sum(0)
    assert torch.allclose(sent.double().sum(0) + traces[0].held[-1], total, atol=1e-5)


@cases(tau=[0, -1.0, float("inf"), float("nan"), "x", True])
def test_a_threshold_that_is_none_is_refused(tau):
    with pytest.raises(ValueError, match="positive number"):
        parse("Strom(0.1)").__class__(tau)
