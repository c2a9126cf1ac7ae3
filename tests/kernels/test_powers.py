"""Powers of two: every backend gives the reference's bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.backends import every, others, reference
from support.cases import cases

OPS = "power_encode", "power_decode"


@others(*OPS)
@given(
    groups=st.lists(st.integers(0, 40), max_size=6),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 2.0, 60.0, 160.0]),
    top=st.sampled_from([-30.0, 0.0, 30.0]),
)
def test_agrees_with_the_reference(kernel, groups, seed, spread, top):
    assert_agrees(kernel, groups, seed, spread, top)


@others(*OPS)
def test_long_vectors(kernel):
    assert_agrees(kernel, [1 << 20, 0, 77], 1, 60.0, 0.0)


def assert_agrees(kernel, groups, seed, spread, top):
    generator = torch.Generator().manual_seed(seed)
    exponent = top - spread * torch.rand(sum(groups), generator=generator)
    values = torch.randn(sum(groups), generator=generator) * 2.0**exponent
    values[torch.rand(sum(groups), generator=generator) < 0.1] *= 0.0  # zeros of both signs
    lengths = torch.tensor(groups, dtype=torch.int32)
    results = []
    for module in (kernel, reference):
        exponents, codes = torch.empty(len(groups), dtype=torch.int8), torch.empty(sum(groups), dtype=torch.uint8)
        count = module.power_encode(values, lengths, exponents, codes)
        back = torch.empty(sum(groups))
        module.power_decode(codes, lengths, exponents, back)
        results.append((count, exponents, codes, back))
    assert results[0][0] == results[1][0] == int((results[0][2] >= 128).sum())
    for mine, theirs in zip(results[0][1:], results[1][1:], strict=True):
        assert torch.equal(mine, theirs)


@every(*OPS)
@cases(groups=[[3, 3], [5, -1], [4, 1]])
def test_groups_that_do_not_fit_are_refused(kernel, groups):
    lengths = torch.tensor(groups, dtype=torch.int32)
    exponents = torch.empty(2 if sum(groups) == 4 else 1, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"fit together|a group of -1"):
        kernel.power_encode(torch.ones(4), lengths, exponents, torch.empty(4, dtype=torch.uint8))


@every(*OPS)
def test_every_code_means_something_finite(kernel):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    for exponent in range(-128, 128):
        values = torch.empty(256)
        kernel.power_decode(
            codes, torch.tensor([256], dtype=torch.int32), torch.tensor([exponent]).to(torch.int8), values
        )
        assert values.isfinite().all()
