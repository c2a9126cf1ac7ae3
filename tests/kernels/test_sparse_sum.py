"""A sum of sparse vectors in one pass is zeros to which one after the other is added: to the bit."""

import math

import pytest
import torch

from support.backends import others, reference, runners
from support.cases import cases
from tersegrad.kernels.cpu import sparse_sum
from tersegrad.kernels.cpu._stream import LONG

SUMS = {repr(kernel): kernel.scatter_sum for kernel in runners("scatter_sum")}
SUMS |= {"cpu, streamed": sparse_sum.sum_streamed, "cpu, one by one": sparse_sum.sum_one_by_one}
every_sum = pytest.mark.parametrize("scatter_sum", SUMS.values(), ids=SUMS.keys())


def sparse(n, counts, seed=0):
    """Positions and values of several vectors, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    positions = [torch.randperm(n, generator=generator)[:count].sort().values.int() for count in counts]
    return torch.cat([torch.empty(0, dtype=torch.int32), *positions]), torch.randn(sum(counts), generator=generator)


def summed(scatter_sum, indices, values, counts, scale, n):
    guarded = torch.full((n + 16,), 77.0)
    assert guarded.data_ptr() % 64 == 0
    finite = scatter_sum(indices, values, counts, scale, guarded[:n])
    assert (guarded[n:] == 77.0).all()
    return finite, guarded[:n]


@every_sum
@cases(
    n=[1, 15, 16, 17, 4096, 4097, 100_003],
    shares=[[], [0.0], [1.0], [0.01] * 4, [0.5, 0.0, 1.0]],
    scale=[1.0, 1 / 3],
)
def test_all_agree_to_the_bit(scatter_sum, n, shares, scale):
    counts = [round(share * n) for share in shares]
    indices, values = sparse(n, counts)
    expected = torch.zeros(n)
    for positions, part in zip(indices.split(counts), values.split(counts), strict=True):
        expected[positions] += part * torch.tensor(scale)
    finite, found = summed(scatter_sum, indices, values, counts, scale, n)
    assert finite is True
    assert torch.equal(found, expected)


@others("scatter_sum")
@cases(n=[LONG - 1, LONG, LONG + 5])
def test_long_vectors_wherever_they_begin(kernel, n):
    """From the length on that the CPU kernel goes by; one that begins within a line is written as others are."""
    indices, values = sparse(n, [n // 100] * 3)
    expected = torch.empty(n)
    assert reference.scatter_sum(indices, values, [n // 100] * 3, 0.25, expected)
    for start in (0, 1, 16):
        memory = torch.full((n + 32,), 77.0)
        assert kernel.scatter_sum(indices, values, [n // 100] * 3, 0.25, memory[start : start + n])
        assert torch.equal(memory[start : start + n], expected)
        assert (memory[:start] == 77.0).all()
        assert (memory[start + n :] == 77.0).all()


@every_sum
@cases(
    "values scale",
    [([1.0, math.nan, 1.0], 1.0), ([math.inf, 1.0, -math.inf], 1.0), ([3e38, 1.0, 3e38], 1.0), ([1.0, 1.0, 1.0], 1e39)],
)
def test_a_sum_that_is_not_finite_is_seen(scatter_sum, values, scale):
    indices = torch.tensor([0, 5, 0], dtype=torch.int32)
    finite, found = summed(scatter_sum, indices, torch.tensor(values), [2, 1], scale, 40)
    assert finite is False
    assert not found.isfinite().all()


@every_sum
@cases(
    "indices counts says",
    [
        ([0, 40], [2], "reach from 0 to 40, the vector has 40"),
        ([-1, 3], [2], "reach from -1 to 3"),
        ([3, 3], [2], "must ascend"),
        ([1, 5, 4], [1, 2], "must ascend"),
    ],
)
def test_a_wrong_index_is_refused_and_nothing_written(scatter_sum, indices, counts, says):
    out = torch.full((40,), 77.0)
    with pytest.raises(IndexError, match=says):
        scatter_sum(torch.tensor(indices, dtype=torch.int32), torch.ones(len(indices)), counts, 1.0, out)
    assert (out == 77.0).all()


@every_sum
@cases("counts values", [([1, 3], 3), ([2], 3), ([4, -1], 3), ([3], 2)])
def test_counts_that_do_not_add_up_are_refused(scatter_sum, counts, values):
    with pytest.raises(ValueError, match=r"indices"):
        scatter_sum(torch.arange(3, dtype=torch.int32), torch.ones(values), counts, 1.0, torch.zeros(40))
