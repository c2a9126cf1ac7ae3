"""VGC's test of every element: every backend gives the reference's bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.backends import every, others, reference
from support.cases import cases

both = every("unambiguous")
MAX = torch.finfo(torch.float32).max


def run(kernel, x, variance, squares, alpha, zeta, tau, capacity):
    kept = torch.full_like(x, -7.0)
    indices = torch.full((capacity,), -1, dtype=torch.int32)
    count = kernel.unambiguous(x, variance, squares, alpha, zeta, tau, kept, indices)
    return count, kept, indices


@others("unambiguous")
@given(
    numel=st.integers(0, 200),
    seed=st.integers(0, 2**32),
    alpha=st.sampled_from([0.0, 0.5, 1.0, 1.5, 1e10]),
    zeta=st.sampled_from([0.0, 0.9, 0.999, 1.0]),
    tau=st.sampled_from([0.0, 0.01, 1.0]),
    capacity=st.integers(0, 200),
)
def test_agrees_with_the_reference(kernel, numel, seed, alpha, zeta, tau, capacity):
    assert_agrees(kernel, numel, seed, alpha, zeta, tau, capacity)


@others("unambiguous")
def test_long_vectors(kernel):
    assert_agrees(kernel, (1 << 20) + 13, 1, 1.0, 0.999, 0.01, 100_000)


def assert_agrees(kernel, numel, seed, alpha, zeta, tau, capacity):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.empty(numel).uniform_(-25, 18, generator=generator)
    x = torch.randn(numel, generator=generator) * scale
    variance, squares = (torch.rand(numel, generator=generator) * scale * scale for _ in range(2))
    zeros = torch.rand(3, numel, generator=generator) < 0.3
    x[zeros[0]], variance[zeros[1]], squares[zeros[1] & zeros[2]] = 0.0, 0.0, 0.0
    mine, theirs = (run(each, x, variance, squares, alpha, zeta, tau, capacity) for each in (kernel, reference))
    assert mine[0] == theirs[0]
    assert torch.equal(mine[1], theirs[1])
    assert torch.equal(mine[2], theirs[2])


@both
@cases(numel=[3, 32, 70], bad=[float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_wherever_it_is(kernel, numel, bad):
    for i in range(numel):
        x = torch.zeros(numel)
        x[i] = bad
        assert run(kernel, x, torch.zeros(numel), torch.ones(numel), 1.0, 0.9, 0.0, numel)[0] == -1


@both
def test_variance_stays_finite(kernel):
    huge = torch.full((40,), MAX)
    count, kept, _ = run(kernel, torch.full((40,), 1e30), huge, huge, 1.0, 1.0, 0.0, 40)
    assert torch.equal(kept, huge if count == 0 else torch.zeros(40))
    _, kept, _ = run(kernel, torch.zeros(40), huge, torch.full((40,), float("nan")), 1.0, 1.0, 0.0, 40)
    assert torch.equal(kept, huge)


@both
def test_squares_that_underflow_do_not_hide_an_element(kernel):
    x = torch.tensor([1e-30, 0.0, -1e-30])
    count, _, indices = run(kernel, x, torch.zeros(3), x.square(), 2.0, 0.9, 0.0, 3)
    assert count == 2
    assert indices[:2].tolist() == [0, 2]


@both
def test_bad_input_is_refused(kernel):
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="of one length"):
        kernel.unambiguous(x, torch.zeros(3), x, 1.0, 0.9, 0.0, x, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="alpha"):
        kernel.unambiguous(x, x, x, -1.0, 0.9, 0.0, x, torch.zeros(4, dtype=torch.int32))
