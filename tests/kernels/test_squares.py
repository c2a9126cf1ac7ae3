"""Sums of squares of all backends agree with the torch reference, bit for bit; a float64 loop is its oracle."""

import pytest
import torch

from support.backends import every, others, reference
from support.cases import cases

OPS = "add_squares", "add_token_squares"
both = every(*OPS)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@others(*OPS)
@cases(numel=[0, 1, 7, 8, 1000, 1 << 20], rows=[0, 1, 5])
def test_add_squares(kernel, numel, rows):
    gradients, start = normal(rows, numel), normal(numel, seed=1).abs()
    fast, plain = start.clone(), start.clone()
    kernel.add_squares(fast, gradients.flatten())
    reference.add_squares(plain, gradients.flatten())
    assert torch.equal(fast, plain)
    want = start.double() + gradients.double().square().sum(0)
    torch.testing.assert_close(plain.double(), want, rtol=1e-6, atol=0)


@both
def test_what_is_not_finite_stays_so(kernel):
    sums = torch.zeros(3)
    kernel.add_squares(sums, torch.tensor([1.0, float("nan"), float("inf"), 1.0, 1.0, 1.0]))
    assert sums[0] == 2.0
    assert sums[1].isnan()
    assert sums[2].isinf()


@both
@cases("sums gradients", [(3, 4), (0, 4), (5, 3)])
def test_rows_must_fit(kernel, sums, gradients):
    with pytest.raises(ValueError, match=f"{gradients} elements are not rows of {sums}"):
        kernel.add_squares(torch.zeros(sums), torch.zeros(gradients))


@others(*OPS)
@cases(samples=[1, 4], length=[1, 6], width=[1, 3, 16], skip=[-1, 2])
def test_add_token_squares(kernel, samples, length, width, skip):
    words = 5
    tokens = torch.randint(words, (samples, length), generator=torch.Generator().manual_seed(0))
    deltas, start = normal(samples, length, width), normal(words, width, seed=1).abs()
    fast, plain = start.flatten().clone(), start.flatten().clone()
    for each, sums in ((kernel, fast), (reference, plain)):
        each.add_token_squares(sums, tokens.flatten(), deltas.flatten(), samples, skip)
    assert torch.equal(fast, plain)
    want = start.double()
    for sample in range(samples):
        total = torch.zeros(words, width).double().index_add_(0, tokens[sample], deltas[sample].double())
        if skip >= 0:
            total[skip] = 0
        want += total.square()
    torch.testing.assert_close(plain.view(words, width).double(), want, rtol=1e-5, atol=1e-6)


@both
def test_no_tokens(kernel):
    sums = torch.ones(4)
    kernel.add_token_squares(sums, torch.empty(0, dtype=torch.int64), torch.empty(0), 3, -1)
    assert sums.tolist() == [1.0] * 4


@both
@cases(token=[-1, 2, 1 << 40])
def test_a_token_without_a_row_writes_nothing(kernel, token):
    sums = torch.zeros(6)
    with pytest.raises(IndexError, match="table of 2 rows"):
        kernel.add_token_squares(sums, torch.tensor([0, token]), torch.ones(6), 1, -1)
    assert not sums.any()


@both
@cases("count deltas sums samples", [(4, 7, 6, 2), (4, 8, 7, 2), (4, 8, 6, 3), (4, 0, 6, 2), (4, 8, 6, 0)])
def test_lengths_must_fit(kernel, count, deltas, sums, samples):
    with pytest.raises(ValueError, match="do not fit together"):
        kernel.add_token_squares(
            torch.zeros(sums), torch.zeros(count, dtype=torch.int64), torch.zeros(deltas), samples, -1
        )
