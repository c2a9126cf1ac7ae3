"""What tests of quantisers share: many draws of one vector, and checks of what draws depend on."""

import math

import pytest
import torch
from torch import Tensor

from support.vectors import gaussian
from tersegrad.core import Compressor, Layout, Payload, accumulate, sections
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import decode, roundtrip


def draws(spec: Compressor, x: Tensor, count: int, seed: int = 0) -> Tensor:
    """What ``count`` encodings of the same vector decode to, one row each."""
    state = spec.init(Layout.flat(x.numel()), seed)
    rows = []
    for _ in range(count):
        rows.append(decode(spec, spec.encode(x, state), state))
        states.commit(state)
    return torch.stack(rows).double()


def assert_unbiased(seen: Tensor, x: Tensor, variance: Tensor, rounding: Tensor, is_noise: bool = True) -> None:
    """The mean over draws is x: to five standard errors of elements with this variance, beside float32 rounding."""
    z = (seen.mean(0) - x.double()).abs() / ((variance / len(seen)).sqrt() + 2.0**-22 * rounding)
    assert float(z.max()) < 5
    if is_noise:  # and it is not smaller than it should be
        assert 0.8 < float(z.square().mean()) < 1.2


def check_draws(spec: Compressor) -> None:
    """They change with the step and with the seed, and with nothing else."""
    x = gaussian(1000)
    first, again, other = (draws(spec, x, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def check_rolled_back_draws(spec: Compressor) -> None:
    """A step that is rolled back is drawn again, and one that is committed is not."""
    x = gaussian(1000)
    state = spec.init(Layout.flat(1000), 0)
    before = states.copy(state)
    body = spec.encode(x, state).body.clone()
    assert states.copy(state) == before
    states.roll_back(state)
    assert torch.equal(spec.encode(x, state).body, body)
    states.commit(state)
    assert not torch.equal(spec.encode(x, state).body, body)


def check_nonfinite(spec: Compressor) -> None:
    """What is not finite has no body, and leaves no trace in the state."""
    for bad in (math.nan, math.inf, -math.inf):
        x = gaussian(1000)
        x[613] = bad
        state = spec.init(Layout.flat(1000), 0)
        before = states.copy(state)
        payload = spec.encode(x, state)
        states.commit(state)
        assert not payload.finite
        assert payload.body.numel() == 0
        assert sections(spec, payload) == {}
        assert states.copy(state) == before


def check_refused_number(spec: Compressor, number: float | tuple[float, ...], says: str, at: int = 0) -> None:
    """A number of a group that cannot be is refused before anything is added."""
    _, payload = roundtrip(spec, gaussian(10))
    new = torch.tensor(number).view(-1).view(torch.uint8)
    body = payload.body.clone()
    body[at : at + new.numel()] = new
    acc = torch.ones(10)
    with pytest.raises(ValueError, match=says):
        accumulate(spec, Payload(body, 10, payload.meta), acc)
    assert bool((acc == 1).all())
