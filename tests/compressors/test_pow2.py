"""Powers of two in 4 bits: the quantiser's bounds, as the notes on the paper derive them."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tersegrad.compressors._pow2 import Pow2, faint
from tersegrad.core import HEADER_NBYTES, Layout, Payload, accumulate

lists = st.lists(st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda v: abs(v) > 1e-30), min_size=1, max_size=50)


def decoded(values: torch.Tensor, groups: list[int] | None = None) -> torch.Tensor:
    codec = Pow2()
    state = codec.init(Layout.flat(values.numel()), 0)
    if groups is not None:
        state["_groups"] = torch.tensor(groups, dtype=torch.int32)
    payload = codec.encode(values, state)
    out = torch.zeros(values.numel())
    accumulate(codec, Payload(payload.body, values.numel(), payload.meta), out)
    return out


@given(lists)
def test_rounds_to_the_nearest_power_of_two(numbers):
    x = torch.tensor(numbers)
    got = decoded(x).double().numpy()
    exact = x.double().numpy()
    top = 2.0 ** np.floor(np.log2(np.abs(exact).max()))
    below = 2.0 ** np.floor(np.log2(np.abs(exact)))
    nearest = np.where(np.abs(exact) - below < 2 * below - np.abs(exact), below, 2 * below)  # a tie goes up
    want = np.sign(exact) * np.clip(nearest, top / 128, top)
    assert np.array_equal(got, want)


@given(lists)
def test_bounds(numbers):
    x = torch.tensor(numbers)
    keep = torch.ones(x.numel(), dtype=torch.bool)
    keep[faint(x, torch.tensor([x.numel()], dtype=torch.int32))] = False
    ratio = (decoded(x) / x)[keep]
    top = 2.0 ** torch.floor(torch.log2(x.abs().max().double()))
    clamped = x[keep].abs().double() > top
    assert (ratio > 0.5).all()
    assert (ratio[clamped] <= 1).all()
    assert ((ratio[~clamped] >= 2 / 3) & (ratio[~clamped] <= 4 / 3)).all()
    assert (x[~keep].abs().double() < 0.75 * top / 128).all()
    assert (x[keep].abs().double() >= 0.75 * top / 128).all()


def test_powers_of_two_within_reach_are_exact():
    x = torch.tensor([2.0**-e * s for e in range(8) for s in (1, -1)])
    assert torch.equal(decoded(x), x)


def test_each_group_has_its_own_largest():
    x = torch.tensor([1.0, 0.5, 1e-6, -2e-6, 3.0])
    got = decoded(x, [2, 0, 2, 1])
    assert torch.equal(got, torch.tensor([1.0, 0.5, 2.0**-20, -(2.0**-19), 2.0]))


def test_half_a_byte_an_element():
    codec = Pow2()
    payload = codec.encode(torch.ones(1000), codec.init(Layout.flat(1000), 0))
    assert len(payload.meta) == 4  # the length of the one group
    assert payload.body.numel() == 8 + 500  # its exponent, padding; nibbles
    assert payload.nbytes == HEADER_NBYTES + 8 + 8 + 500
