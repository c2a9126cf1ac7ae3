"""Sums of whole vectors: every backend agrees with torch, wherever the vectors begin and end in memory."""

import math

import pytest
import torch

from support.backends import every, others, reference
from support.cases import cases
from support.vectors import LONG
from tersegrad.kernels.cpu import add as cpu

OFFSETS = [(0, 0, 0), (0, 0, 1), (3, 1, 5), (0, 0, 15), (1, 1, 16)]
SCALES = [1.0, -0.1, 0.0, 1e-39, 3e38]


def normal(n, seed, offset=0):
    return torch.randn(n + offset, generator=torch.Generator().manual_seed(seed))[offset:]


def added(add, n, offsets, scale):
    """The sum, with what lies around it, which stays as it is."""
    buffer = torch.full((n + offsets[2] + 8,), 77.0)
    add(normal(n, 1, offsets[0]), normal(n, 2, offsets[1]), scale, buffer[offsets[2] : offsets[2] + n])
    assert (buffer[: offsets[2]] == 77.0).all()
    assert (buffer[offsets[2] + n :] == 77.0).all()
    return buffer


def assert_agrees(add, n, offsets, scale):
    found, expected = added(add, n, offsets, scale), added(reference.add_scaled, n, offsets, scale)
    if scale == 1.0:
        assert torch.equal(found, expected)  # nothing is multiplied, so nothing can be rounded twice
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@others("add_scaled")
@cases(n=[0, 1, 15, 16, 17, 64, 1001], offsets=OFFSETS, scale=SCALES)
def test_agrees_with_the_reference(kernel, n, offsets, scale):
    assert_agrees(kernel.add_scaled, n, offsets, scale)


@others("add_scaled")
@cases(n=[cpu.LONG - 1, cpu.LONG, cpu.LONG + 3, LONG], offsets=[(0, 0, 0), (3, 1, 5)], scale=[1.0, -0.1])
def test_long_vectors(kernel, n, offsets, scale):
    assert_agrees(kernel.add_scaled, n, offsets, scale)


@cases(n=[0, 1, 15, 16, 17, 64, 1001], offsets=OFFSETS, scale=SCALES)
def test_streamed_on_the_cpu_whatever_the_length(n, offsets, scale):
    assert_agrees(cpu.stream_scaled, n, offsets, scale)


def assert_not_finite_stays_so(add, n):
    a, b, out = torch.zeros(n), torch.zeros(n), torch.empty(n)
    a[3], b[30] = math.nan, math.inf
    add(a, b, 1.0, out)
    assert out.isnan().nonzero().flatten().tolist() == [3]
    assert out.isinf().nonzero().flatten().tolist() == [30]


@every("add_scaled")
@cases(n=[40, LONG])
def test_what_is_not_finite_stays_so(kernel, n):
    assert_not_finite_stays_so(kernel.add_scaled, n)


def test_what_is_not_finite_stays_so_when_streamed():
    assert_not_finite_stays_so(cpu.stream_scaled, 40)


@every("add_scaled")
def test_lengths_must_agree(kernel):
    for add in (kernel.add_scaled, cpu.stream_scaled):
        with pytest.raises(ValueError, match="same length, got 3, 4 and 3"):
            add(torch.zeros(3), torch.zeros(4), 1.0, torch.zeros(3))
