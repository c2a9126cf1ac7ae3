"""Adding and selecting in one pass is adding, then selecting: to the bit, whatever the vectors are like."""

import math

import pytest
import torch

from support.backends import every, others, reference
from support.cases import cases
from support.vectors import SHAPES, gaussian
from tersegrad.kernels.cpu import _candidates, topk_of_sum
from tersegrad.kernels.cpu._stream import LONG
from tersegrad.kernels.ops import top_k_capacity

KINDS = ["gaussian", "zeros", "few levels", "ascending", "descending", "sparse", "denormal"]
PAIRS = [(math.nan, 1.0), (1.0, math.inf), (math.inf, -math.inf), (3e38, 3e38)]


class Streamed:
    """The one-pass kernel of the CPU, whatever the length."""

    add_top_k = staticmethod(topk_of_sum.add_top_k_streamed)

    def __repr__(self):
        return "cpu, streamed"


def with_streamed(mark):
    return pytest.mark.parametrize("kernel", [*mark.args[1], Streamed()], ids=repr)


all_of_them = with_streamed(every("add_top_k"))
fast = with_streamed(others("add_top_k"))


def added(kernel, a, b, k, offset=0):
    n = a.numel()
    indices = torch.full((k + 1,), -7, dtype=torch.int32)
    candidates = torch.empty(top_k_capacity(n, k), dtype=torch.int32)
    buffer = torch.full((n + offset + 8,), 77.0)
    total = buffer[offset : offset + n]
    found = kernel.add_top_k(a, b, k, total, indices, candidates)
    assert (buffer[:offset] == 77.0).all()
    assert (buffer[offset + n :] == 77.0).all()
    assert indices[k] == -7
    return found, total, indices[:k]


def assert_agrees(kernel, a, b, k, offset=0):
    found, total, indices = added(kernel, a, b, k, offset)
    assert found == k
    assert torch.equal(total, a + b)
    assert torch.equal(indices, added(reference, a, b, k)[2])


@fast
@cases(kind=KINDS, n=[1, 63, 64, 65, 1000, 100_003], share=[0.0, 0.01, 0.5, 1.0])
def test_one_pass_is_two(kernel, kind, n, share):
    shape = SHAPES[kind]
    assert_agrees(kernel, shape(n), 0.5 * shape(n).flip(0), max(1, round(share * n)))


@others("add_top_k")
@cases(kind=KINDS)
def test_long_vectors_of_all_kinds(kernel, kind):
    shape = SHAPES[kind]
    assert_agrees(kernel, shape(LONG + 77), 0.5 * shape(LONG + 77).flip(0), LONG // 100)


@fast
@cases(inside=[100.0, 0.0])  # guess too high: second pass; too low: overflow
def test_exact_when_the_guess_is_wrong(kernel, inside):
    """The CPU kernel's sample is drawn at fixed positions: what lies there, and only there, misleads it."""
    n, k = 400_000, 4_000
    width = _candidates.sample_width(n, k, top_k_capacity(n, k) // 2)
    a, b = gaussian(n), gaussian(n, seed=1)
    for i in range(n // width):
        a[int(_candidates.place_drawn(i, width))] *= inside
        b[int(_candidates.place_drawn(i, width))] *= inside
    assert_agrees(kernel, a, b, k)


@all_of_them
@cases(n=[65, 100_003], where=[0, 63, -1], pair=PAIRS, share=[0.01, 1.0])
def test_a_sum_that_is_not_finite_is_seen(kernel, n, where, pair, share):
    a, b = gaussian(n), gaussian(n, seed=1)
    a[where], b[where] = pair
    assert added(kernel, a, b, max(1, round(share * n)))[0] == -1


@others("add_top_k")
@cases(where=[0, LONG // 2, -1], pair=PAIRS)
def test_a_long_sum_that_is_not_finite_is_seen(kernel, where, pair):
    a, b = gaussian(LONG + 77), gaussian(LONG + 77, seed=1)
    a[where], b[where] = pair
    assert added(kernel, a, b, LONG // 100)[0] == -1


@all_of_them
@cases(bits=[0x7F800000, 0x7FC00000, 0x7FFFFFFF])
def test_many_that_are_not_finite(kernel, bits):
    a = torch.full((100_003,), bits, dtype=torch.int32).view(torch.float32)
    assert added(kernel, a, a, 1000)[0] == -1


@others("add_top_k")
@cases(n=[LONG - 1, LONG, LONG + 77], offset=[0, 1, 16])
def test_long_vectors_wherever_they_begin(kernel, n, offset):
    assert_agrees(kernel, gaussian(n), gaussian(n, seed=1), n // 100, offset)


@every("add_top_k")
@cases(n=[3, LONG])
def test_none_of_them(kernel, n):
    found, total, _ = added(kernel, torch.ones(n), torch.ones(n), 0)
    assert found == 0
    assert bool((total == 2.0).all())
