"""Single elements read and added to: every backend agrees with the torch reference; numpy is the oracle."""

import math

import numpy as np
import pytest
import torch

from support.backends import every
from support.cases import cases
from support.vectors import BROKEN, LONG, SIZES, gaussian
from tersegrad.kernels import cpu

OPS = "gather", "scatter_add"
both = every(*OPS)


def some_indices(n, seed=2):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: n // 3].sort().values.int()


@both
@cases(n=[*SIZES, LONG])
def test_gather(kernel, n):
    x, indices = gaussian(n), some_indices(n)
    values = torch.zeros(indices.numel())
    kernel.gather(x, indices, values)
    assert torch.equal(values, x[indices.long()])


@both
@cases(n=[*SIZES, LONG], scale=[1.0, -1.0, 0.1, 1e-40, 1 / 3])
def test_scatter_add_to_the_bit(kernel, n, scale):
    found, indices = gaussian(n), some_indices(n)
    values, oracle = gaussian(indices.numel(), seed=3), found.numpy().copy()
    oracle[indices.numpy()] += np.float32(scale) * values.numpy()
    assert kernel.scatter_add(found, indices, values, scale) is True
    assert np.array_equal(found.numpy(), oracle)


@both
@cases("value scale", [*((bad, 1.0) for bad in BROKEN), (3e38, 2.0)])
def test_scatter_add_says_whether_what_it_wrote_is_finite(kernel, value, scale):
    acc, indices = gaussian(100), torch.tensor([3, 40, 99], dtype=torch.int32)
    acc[50] = math.nan  # which it does not touch
    assert kernel.scatter_add(acc, indices, torch.ones(3), scale) is True
    assert kernel.scatter_add(acc, indices, torch.tensor([1.0, value, 1.0]), scale) is False
    acc[99] = math.inf
    assert kernel.scatter_add(acc, indices[2:], torch.ones(1), scale) is False
    assert kernel.scatter_add(acc, indices[:0], torch.ones(0), scale) is True


@both
@cases(index=[-1, 5, -(2**31), 2**31 - 1])
def test_an_index_out_of_range_is_an_error_and_writes_nothing(kernel, index):
    indices = torch.tensor([0, 4, index, 1], dtype=torch.int32)
    acc, values = torch.zeros(5), torch.ones(4)
    with pytest.raises(IndexError, match="the vector has 5 elements"):
        kernel.scatter_add(acc, indices, values, 1.0)
    with pytest.raises(IndexError, match=str(index)):
        kernel.gather(acc, indices, values)
    assert acc.sum() == 0
    assert values.sum() == 4


@both
def test_lengths_must_match(kernel):
    with pytest.raises(ValueError, match="2 indices but 3 values"):
        kernel.gather(torch.ones(3), torch.zeros(2, dtype=torch.int32), torch.ones(3))


def test_cpu_kernels_refuse_memory_they_would_misread():
    ints = torch.empty(100, dtype=torch.int32)
    with pytest.raises(TypeError, match="float64"):
        cpu.all_finite(torch.ones(3, dtype=torch.float64))
    with pytest.raises(TypeError, match="strides"):
        cpu.above(torch.ones(6)[::2], 1.0, ints)
    with pytest.raises(TypeError, match=r"shape \(2, 3\)"):
        cpu.abs_sums(torch.ones(2, 3), 1.0)
    with pytest.raises(TypeError, match="int64"):
        cpu.gather(torch.ones(3), torch.zeros(1, dtype=torch.int64), torch.ones(1))
