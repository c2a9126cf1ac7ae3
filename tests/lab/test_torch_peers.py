"""The papers' baselines in torch operations: which elements they choose."""

import pytest
import torch

from tersegrad.lab.torch_peers import sampled, top_k


def chance() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_top_k_is_exact():
    x = torch.randn(1000, generator=chance())
    assert set(top_k(x, 10, chance()).tolist()) == set(x.abs().argsort()[-10:].tolist())


@pytest.mark.parametrize("ratio", [0.01, 0.001])
@pytest.mark.parametrize("law", [torch.randn, torch.rand])
def test_a_sampled_threshold_finds_about_as_many_of_the_largest(law, ratio):
    x = law(200_000, generator=chance())
    k = round(ratio * x.numel())
    chosen = sampled(x, k, chance())
    assert 0.8 * k <= chosen.numel() <= k
    assert len(set(chosen.tolist())) == chosen.numel()
    among = set(x.abs().argsort()[-round(1.3 * k) - 1 :].tolist())
    assert set(chosen.tolist()) <= among, "none that is not among the 1.3 k largest"


def test_too_many_are_cut_to_the_largest():
    x = torch.zeros(100_000)
    x[::10] = 1.0 + torch.rand(10_000, generator=chance())
    x[50:150] = 100.0  # none of these, or many, are in the sample
    chosen = sampled(x, 200, chance())
    assert chosen.numel() <= 200
    assert set(range(50, 150)) <= set(chosen.tolist())


def test_a_short_vector_is_looked_at_whole():
    x = torch.tensor([0.0, 5.0, -7.0, 1.0])
    assert sampled(x, 1, chance()).tolist() == [2]
