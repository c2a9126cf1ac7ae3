"""Adding and selecting in one pass is adding, then selecting: to the bit, whatever the vectors are like."""

import math

import pytest
import torch

from tersegrad.kernels.cpu import add_select as cpu
from tersegrad.kernels.cpu import select
from tersegrad.kernels.reference import add_select as reference
from tersegrad.kernels.reference.select import top_k_capacity

ADDS = [cpu.add_top_k_streamed, cpu.add_top_k, reference.add_top_k]


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


SHAPES = {
    "gaussian": gaussian,
    "zeros": torch.zeros,
    "few levels": lambda n: (gaussian(n) * 2).round(),
    "ascending": lambda n: torch.arange(n, dtype=torch.float32),
    "descending": lambda n: -torch.arange(n, 0, -1, dtype=torch.float32),
    "sparse": lambda n: gaussian(n) * (gaussian(n, seed=1) > 2.5),
    "denormal": lambda n: gaussian(n) * 1e-42,
}


def added(add, a, b, k):
    indices = torch.full((k + 1,), -7, dtype=torch.int32)
    candidates = torch.empty(top_k_capacity(a.numel(), k), dtype=torch.int32)
    total = torch.full((a.numel() + 8,), 77.0)
    found = add(a, b, k, total[: a.numel()], indices, candidates)
    assert (total[a.numel() :] == 77.0).all()
    assert indices[k] == -7
    return found, total[: a.numel()], indices[:k]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000, 100_003])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_one_pass_is_two(shape, n, share):
    a, b, k = shape(n), 0.5 * shape(n).flip(0), max(1, round(share * n))
    results = [added(add, a, b, k) for add in ADDS]
    for found, total, indices in results:
        assert found == k
        assert torch.equal(total, a + b)
        assert torch.equal(indices, results[-1][2])


@pytest.mark.parametrize("inside", [100.0, 0.0])  # guess too high: second pass; too low: overflow
def test_exact_when_the_guess_is_wrong(inside):
    n, k = 400_000, 4_000
    width = select._sample_width(n, k, top_k_capacity(n, k) // 2)
    a, b = gaussian(n), gaussian(n, seed=1)
    for i in range(n // width):
        a[int(select._place_drawn(i, width))] *= inside
        b[int(select._place_drawn(i, width))] *= inside
    (_, total, one_pass), _, (_, _, expected) = (added(add, a, b, k) for add in ADDS)
    assert torch.equal(total, a + b)
    assert torch.equal(one_pass, expected)


@pytest.mark.parametrize("n", [65, 100_003])
@pytest.mark.parametrize("where", [0, 63, -1])
@pytest.mark.parametrize("pair", [(math.nan, 1.0), (1.0, math.inf), (math.inf, -math.inf), (3e38, 3e38)])
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_sum_that_is_not_finite_is_seen(n, where, pair, share):
    a, b = gaussian(n), gaussian(n, seed=1)
    a[where], b[where] = pair
    for add in ADDS:
        assert added(add, a, b, max(1, round(share * n)))[0] == -1


@pytest.mark.parametrize("bits", [0x7F800000, 0x7FC00000, 0x7FFFFFFF])
def test_many_that_are_not_finite(bits):
    a = torch.full((100_003,), bits, dtype=torch.int32).view(torch.float32)
    for add in ADDS:
        assert added(add, a, a, 1000)[0] == -1


@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("n", [cpu.LONG - 1, cpu.LONG, cpu.LONG + 77])
def test_long_vectors_wherever_they_begin(n, offset):
    a, b, k = gaussian(n), gaussian(n, seed=1), n // 100
    indices, expected = torch.empty(2, k, dtype=torch.int32)
    candidates = torch.empty(top_k_capacity(n, k), dtype=torch.int32)
    total = torch.empty(n + offset)[offset:]
    assert cpu.add_top_k(a, b, k, total, indices, candidates) == k
    assert torch.equal(total, a + b)
    assert reference.add_top_k(a, b, k, torch.empty(n), expected, candidates) == k
    assert torch.equal(indices, expected)


def test_none_of_them():
    a, out = torch.ones(3), torch.empty(3)
    empty = torch.empty(0, dtype=torch.int32)
    assert cpu.add_top_k(a, a, 0, out, empty, torch.empty(top_k_capacity(3, 0), dtype=torch.int32)) == 0
    assert out.tolist() == [2.0] * 3
