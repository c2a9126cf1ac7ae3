"""Slicing kernels of all backends agree with the torch reference, bit for bit; torch's own permute is its oracle."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import every, others, reference
from support.cases import cases

OPS = "to_slices", "from_slices"
both = every(*OPS)
SHAPES = [
    (1, 1, 1),
    (16, 16, 9),
    (64, 3, 9),
    (65, 7, 9),
    (3, 5, 9),
    (130, 75, 1),
    (70, 2, 125),
    (1, 40, 4),
    (128, 73, 3),
    (512, 257, 9),
]


def random(numel, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@both
@cases("filters depth positions", SHAPES)
def test_filters_come_to_lie_side_by_side(kernel, filters, depth, positions):
    x = random(filters * depth * positions)
    slices = torch.empty_like(x)
    kernel.to_slices(x, slices, filters, positions)
    expected = x.view(filters, depth, positions).permute(2, 1, 0).contiguous().view(-1)
    assert torch.equal(slices, expected)


@both
@cases("filters depth positions", SHAPES)
def test_back_again_with_a_mean(kernel, filters, depth, positions):
    x = random(filters * depth * positions)
    mean = random(x.numel(), seed=1)
    slices, back = torch.empty_like(x), random(x.numel(), seed=2)
    kernel.to_slices(x, slices, filters, positions)
    kernel.from_slices(slices, torch.zeros_like(x), back, filters, positions)
    assert torch.equal(back, x)
    left = x.clone()
    kernel.from_slices(slices, torch.zeros_like(x), left, filters, positions, subtract=True)
    assert not left.any()
    kernel.from_slices(slices, mean, back, filters, positions)
    assert torch.equal(back, (slices + mean).view(positions, depth, filters).permute(2, 1, 0).reshape(-1))


@both
@cases("filters blocks run", SHAPES)
def test_runs_stay_together(kernel, filters, blocks, run):
    x = random(filters * blocks * run)
    slices, back = torch.empty_like(x), torch.empty_like(x)
    kernel.to_slices(x, slices, filters, run=run)
    assert torch.equal(slices, x.view(filters, blocks, run).transpose(0, 1).reshape(-1))
    kernel.from_slices(slices, torch.zeros_like(x), back, filters, run=run)
    assert torch.equal(back, x)


@others(*OPS)
@settings(max_examples=50, deadline=None)
@given(
    *(st.integers(1, 140), st.integers(1, 90), st.integers(1, 30), st.booleans(), st.booleans(), st.integers(0, 2**31)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_all_agree_bit_for_bit(kernel, filters, depth, inner, by_position, subtract, seed, part):
    layout = (filters, inner, 1) if by_position else (filters, 1, inner)
    numel, row = filters * depth * inner, filters if by_position else filters * inner
    first, last = sorted(round(share * (numel // row)) for share in part)
    x, whole, mean = (random(numel, seed + i) for i in range(3))
    slices, around = whole[row * first : row * last], mean[row * first : row * last]
    results = []
    for each in (kernel, reference):
        guarded = torch.full((numel + 16,), 7.0)
        buffer = guarded[8 : 8 + numel]
        each.to_slices(x, buffer[: slices.numel()], *layout, first)
        there = buffer[: slices.numel()].clone()
        buffer.copy_(x)
        each.from_slices(slices, around, buffer, *layout, subtract, first)
        assert bool((torch.cat([guarded[:8], guarded[-8:]]) == 7.0).all())
        results.append((there, buffer.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@both
@cases("filters depth positions", SHAPES)
@cases(by_position=[True, False])
def test_some_of_the_rows(kernel, filters, depth, positions, by_position):
    """Any rows, one after the other, are what all of them are at once."""
    layout, row = ((filters, positions, 1), filters) if by_position else ((filters, 1, positions), filters * positions)
    x, mean = random(filters * depth * positions), random(filters * depth * positions, seed=1)
    whole, parts, back = (torch.empty_like(x) for _ in range(3))
    kernel.to_slices(x, whole, *layout)
    count, left = x.numel() // row, x.clone()
    ends = sorted({0, count // 3, count // 3 + 1, count})
    for first, last in pairwise(ends):
        here = slice(row * first, row * last)
        kernel.to_slices(x, parts[here], *layout, first)
        kernel.from_slices(parts[here], torch.zeros_like(parts[here]), back, *layout, first=first)
        kernel.from_slices(parts[here], mean[here], left, *layout, subtract=True, first=first)
    assert torch.equal(parts, whole)
    assert torch.equal(back, x)
    expected = x.clone()
    kernel.from_slices(whole, mean, expected, *layout, subtract=True)
    assert torch.equal(left, expected)


@both
def test_wrong_sizes_and_types_are_refused(kernel):
    x, out = torch.zeros(12), torch.zeros(12)
    with pytest.raises(ValueError, match="11 elements are not rows of 2"):
        kernel.to_slices(x, torch.zeros(11), 2, 3)
    with pytest.raises(ValueError, match="from row 3 on, of 12"):
        kernel.to_slices(x, torch.zeros(8), 2, 3, 1, 3)
    with pytest.raises(ValueError, match="12 elements do not go with a mean of 6"):
        kernel.from_slices(x, torch.zeros(6), out, 2, 3)
    for layout in ((5, 1, 1), (0, 1, 1), (2, -3, -1), (2, 3, 2), (2, 5, 1)):
        with pytest.raises(ValueError, match=f"are not {layout[0]} filters"):
            kernel.to_slices(x, out, *layout)
    for bad in (torch.zeros(12, dtype=torch.float64), torch.zeros(3, 4), torch.zeros(24)[::2]):
        with pytest.raises(TypeError, match="contiguous 1-D float32"):
            kernel.to_slices(bad, out, 2, 3)
