"""Sums of whole vectors: the CPU kernel agrees with torch, wherever the vectors begin and end in memory."""

import math

import pytest
import torch

from tersegrad.kernels.cpu import add as cpu
from tersegrad.kernels.reference import add as reference

every = pytest.mark.parametrize(
    "add", [cpu.add_scaled, cpu.stream_scaled, reference.add_scaled], ids=["cpu", "streamed", "reference"]
)


def normal(n, seed, offset=0):
    return torch.randn(n + offset, generator=torch.Generator().manual_seed(seed))[offset:]


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 64, 1001])
@pytest.mark.parametrize("offsets", [(0, 0, 0), (0, 0, 1), (3, 1, 5), (0, 0, 15), (1, 1, 16)])
@pytest.mark.parametrize("scale", [1.0, -0.1, 0.0, 1e-39, 3e38])
def test_streamed_is_the_reference(n, offsets, scale):
    a, b = normal(n, 1, offsets[0]), normal(n, 2, offsets[1])
    results = []
    for add in (cpu.stream_scaled, reference.add_scaled):
        room = torch.full((n + offsets[2] + 8,), 77.0)
        add(a, b, scale, room[offsets[2] : offsets[2] + n])
        assert (room[: offsets[2]] == 77.0).all()
        assert (room[offsets[2] + n :] == 77.0).all()
        results.append(room)
    if scale == 1.0:
        assert torch.equal(*results)  # nothing is multiplied, so nothing can be rounded twice
    else:
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", [cpu.LONG - 1, cpu.LONG, cpu.LONG + 3])
def test_long_and_short_are_the_same(n):
    a, b, out = normal(n, 1), normal(n, 2), torch.empty(n)
    cpu.add_scaled(a, b, 1.0, out)
    assert torch.equal(out, a + b)


@every
def test_what_is_not_finite_stays_so(add):
    a, b, out = torch.zeros(40), torch.zeros(40), torch.empty(40)
    a[3], b[30] = math.nan, math.inf
    add(a, b, 1.0, out)
    assert out.isnan().nonzero().flatten().tolist() == [3]
    assert out.isinf().nonzero().flatten().tolist() == [30]


@every
def test_lengths_must_agree(add):
    with pytest.raises(ValueError, match="vectors of 3 and 4 elements, and their sum of 3"):
        add(torch.zeros(3), torch.zeros(4), 1.0, torch.zeros(3))
