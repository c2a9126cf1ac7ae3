"""Threshold: all that exceed tau, with their values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.cases import cases
from tersegrad import parse, roundtrip
from tersegrad.comm import threads
from tersegrad.compressors import Threshold
from tersegrad.core import Layout, Step, reduce, state


def test_what_exceeds_tau_and_nothing_else():
    x = torch.tensor([0.5, -0.5, 0.51, -3.0, 0.0])
    decoded, _ = roundtrip("Threshold(0.5)", x)
    assert torch.equal(decoded, torch.tensor([0.0, 0.0, 0.51, -3.0, 0.0]))


@given(st.lists(st.floats(-8, 8, width=32), max_size=100), st.floats(0.125, 8, width=32))
def test_is_where(values, tau):
    x = torch.tensor(values, dtype=torch.float32)
    decoded, _ = roundtrip(Threshold(tau), x)
    assert torch.equal(decoded, torch.where(x.abs() > tau, x, 0.0))


@cases(x=[torch.zeros(1000), torch.full((1000,), 0.4)])
def test_nothing_exceeds_nothing_is_sent(x):
    decoded, payload = roundtrip("Threshold(0.5)", x)
    assert not bool(decoded.any())
    assert payload.body.numel() <= 32


def test_values_in_any_codec():
    x = torch.linspace(-1, 1, 1000)
    decoded, _ = roundtrip("Threshold(0.5, values=BF16())", x)
    want = torch.where(x.abs() > 0.5, x.bfloat16().float(), 0.0)
    assert torch.equal(decoded, want)


def test_grace_compared_with_the_signed_maximum():
    """There, a vector with no positive element was sent whole, 1000 of 1000, though all of it was below tau."""
    x = -torch.linspace(0.001, 0.009, 1000)
    decoded, payload = roundtrip("Threshold(0.01)", x)
    assert not bool(decoded.any())
    assert payload.body.numel() <= 32


def test_grace_cut_unequal_counts_into_equal_slices():
    """There, elements of one worker were taken for another's, or dropped, when workers sent different numbers."""
    counts = (0, 3, 250, 1)
    gradients = []
    for count in counts:
        x = torch.full((1000,), 0.1)
        x[:count] = 1.0 + torch.arange(count) / 1000
        gradients.append(x)

    def work(comm):
        reducer, bucket = parse("AllGather(Threshold(0.5))"), Layout.flat(1000)
        x, out = gradients[comm.rank].clone(), torch.empty(1000)
        memory = reducer.init(bucket, comm)
        reduce(reducer, Step(bucket), x, out, memory, comm)
        state.commit(memory)
        return out, x

    want = torch.stack([torch.where(g > 0.5, g, 0.0) for g in gradients]).mean(0)
    for (out, rest), before in zip(threads.run(4, work), gradients, strict=True):
        torch.testing.assert_close(out, want)
        assert torch.equal(rest, torch.where(before > 0.5, 0.0, before))


@cases(tau=[0, -1.0, float("inf"), float("nan"), "x", True])
def test_a_threshold_that_is_none_is_refused(tau):
    with pytest.raises(ValueError, match="positive number"):
        Threshold(tau)


def test_values_that_select_again_are_refused():
    with pytest.raises(ValueError, match="drop values"):
        parse("Threshold(0.1, values=TopK(0.1))")
