"""SampledTopK: a threshold out of a sample; exact top-k where too many pass it."""

import pytest
import torch

from support.cases import cases
from support.vectors import gaussian
from tersegrad import roundtrip
from tersegrad.compressors import SampledTopK
from tersegrad.core import Layout, state


def top(x, k):
    return set(torch.topk(x.abs(), k).indices.tolist())


def chosen(method, x, steps=1, seed=0):
    memory = method.init(Layout.flat(x.numel()), seed)
    picked = []
    for _ in range(steps):
        positions = method.select(x, memory)
        state.commit(memory)
        picked.append(positions.tolist())
    return picked


def test_a_sample_of_everything_is_exact():
    x = gaussian(5000)
    for method in (SampledTopK(0.01, sample=1.0), SampledTopK(0.01)):  # 64 / 0.01 is more than there is
        assert set(chosen(method, x)[0]) == top(x, 50)


@cases(ratio=[0.1, 0.01])
def test_what_passes_is_the_largest_and_about_as_many_as_asked(ratio):
    n = 100_000
    x, k = gaussian(n), round(ratio * n)
    for positions in chosen(SampledTopK(ratio), x, steps=20):
        assert positions == sorted(positions)
        assert set(positions) == top(x, len(positions))  # above a threshold is the top of something
        assert 0.5 * k <= len(positions) <= 4 / 3 * k  # 64 of the largest are in a sample, give or take 8


def test_if_too_many_pass_exactly_k_are_sent():
    """Constant: the threshold is reached by all."""
    assert [len(p) for p in chosen(SampledTopK(0.01), torch.full((100_000,), -0.25))] == [1000]


def test_if_too_few_pass_fewer_are_sent():
    x, k = gaussian(100_000), 100
    counts = [len(p) for p in chosen(SampledTopK(0.001), x, steps=40)]
    assert min(counts) < k
    assert max(counts) <= 4 / 3 * k
    assert 0.8 < sum(counts) / (40 * k) < 1.2


def test_zeros_are_not_sent_when_the_sample_holds_little_else():
    x = torch.zeros(100_000)
    x[::1000] = 1.0
    assert [len(p) for p in chosen(SampledTopK(0.01), x)] == [100]
    assert [len(p) for p in chosen(SampledTopK(0.01), torch.zeros(100_000))] == [0]


def test_another_sample_at_each_step_and_seed():
    x, method = gaussian(100_000), SampledTopK(0.01)
    assert len({tuple(p) for p in chosen(method, x, steps=10)}) > 5
    assert chosen(method, x, seed=1) != chosen(method, x, seed=2)
    assert chosen(method, x, seed=1) == chosen(method, x, seed=1)


def test_a_sample_does_not_keep_step_with_the_rows_of_a_matrix():
    """One column of hundred is large: a sample at a fixed stride would see all of it or none."""
    x = gaussian(100_000) * 0.01
    x.view(1000, 100)[:, 7] += 1.0
    counts = [len(p) for p in chosen(SampledTopK(0.01), x, steps=10)]
    assert all(500 <= count <= 4000 / 3 for count in counts)


@cases(bad=[float("nan"), float("inf"), float("-inf")])
@cases(where=[0, 5000, 99_999])
def test_not_finite_whether_sampled_or_not(bad, where):
    x = gaussian(100_000)
    x[where] = bad
    _, payload = roundtrip("SampledTopK(0.01)", x)
    assert not payload.finite


def test_values_in_any_codec():
    x = gaussian(100_000)
    decoded, _ = roundtrip("SampledTopK(0.01, values=BF16())", x)
    sent = decoded != 0
    assert torch.equal(decoded[sent], x[sent].bfloat16().float())


@cases("field value", [("ratio", 0.0), ("ratio", 1.1), ("sample", 0.0), ("sample", 2)])
def test_what_cannot_be_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}.*above 0 and at most 1"):
        SampledTopK(**{"ratio": 0.01, field: value})
