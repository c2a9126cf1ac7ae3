"""Long vectors are fitted on a sample: the density still holds, and nothing hides outside the sample."""

import pytest
import torch

from support.cases import cases
from tersegrad import SIDCo
from tersegrad.compressors.sidco.sample import SAMPLE, SLICE, _packed_slices
from tersegrad.core import Layout
from tersegrad.core import state as states

N = 3 * SAMPLE + 12_345


@cases(law=["exponential", "gamma", "pareto"])
@cases(ratio=[0.1, 0.001])
def test_the_density_holds(law, ratio):
    x = torch.randn(N, generator=torch.Generator().manual_seed(1)).pow_(3)
    spec = SIDCo(ratio, law=law)
    state = spec.init(Layout.flat(N), 0)
    for _ in range(25):
        sent = spec.select(x, state).numel()
        states.commit(state)
    assert sent == pytest.approx(ratio * N, rel=0.1)


@cases(bad=[float("nan"), float("inf"), -float("inf")])
@cases(where=[SLICE + 5, 3 * SAMPLE // 2 + SLICE, N - 1])
def test_a_bad_value_outside_the_sample_is_found(bad, where):
    x = torch.randn(N, generator=torch.Generator().manual_seed(1))
    spec = SIDCo(0.001)
    state = spec.init(Layout.flat(N), 0)
    x[where] = bad
    assert not spec.encode(x, state).finite


def test_one_slice_of_every_group_and_another_one_next_time():
    every = 5
    x = torch.arange(every * SAMPLE, dtype=torch.float32)
    places = []
    for calls in range(5):
        slices = _packed_slices(x, every, {"calls": calls}).view(-1, SLICE)
        assert torch.equal(slices, slices[:, :1] + torch.arange(SLICE)), "a slice is contiguous"
        first = (slices[:, 0] / SLICE).long()
        assert torch.equal(first // every, torch.arange(len(first))), "one of every group"
        places.append(first % every)
    for place in places:
        assert torch.bincount(place, minlength=every).min() > 0.1 * len(place), "all places of a group are used"
    assert not torch.equal(places[0], places[1])
