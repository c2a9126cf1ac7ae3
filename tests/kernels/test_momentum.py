"""Momentum before sending: every backend agrees with the torch reference bit for bit; torch's SGD is its oracle."""

import pytest
import torch

from support.backends import every, others, reference
from support.cases import cases

OPS = "add_momentum", "mask_sent"
both = every(*OPS)
either = cases(nesterov=[False, True])


def normal(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def added(kernel, n, momentum, nesterov, scale=1.0):
    gradient, velocity, residual = (scale * normal(n, seed) for seed in (1, 2, 3))
    out = torch.full((n,), 77.0), torch.full((n,), 77.0)
    kernel.add_momentum(gradient, velocity, residual, momentum, nesterov, *out)
    return out


@others(*OPS)
@either
@cases(n=[0, 1, 7, 64, 1001, 1 << 20], momentum=[0.0, 0.3, 0.9], scale=[1.0, 1e-39, 1e37])
def test_agrees_with_the_reference(kernel, n, momentum, nesterov, scale):
    fast, plain = (added(each, n, momentum, nesterov, scale) for each in (kernel, reference))
    assert torch.equal(fast[0], plain[0])
    assert torch.equal(fast[1], plain[1])


@both
@either
def test_one_step_is_that_of_sgd(kernel, nesterov):
    gradient, velocity, residual = (normal(100, seed) for seed in (1, 2, 3))
    weights = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9, nesterov=nesterov)
    optimizer.state[weights]["momentum_buffer"] = velocity.clone()
    weights.grad = gradient.clone()
    optimizer.step()
    next_velocity, total = torch.empty(100), torch.empty(100)
    kernel.add_momentum(gradient, velocity, residual, 0.9, nesterov, next_velocity, total)
    torch.testing.assert_close(next_velocity, optimizer.state[weights]["momentum_buffer"])
    torch.testing.assert_close(total, residual - weights.detach())


@both
@either
@cases(scale=[1.0, 1e-39])
def test_only_what_was_sent_is_masked(kernel, nesterov, scale):
    n = 1000
    velocity, residual = scale * normal(n, 2), scale * normal(n, 3)
    next_velocity, total = added(kernel, n, 0.9, nesterov, scale)
    rest = total.clone()
    rest[100:200] = 0.0  # sent whole
    rest[200:300] *= 0.99  # sent in part
    rest[300:400] *= 1 + 2.0**-23  # rounded
    before = next_velocity.clone()
    kernel.mask_sent(velocity, residual, rest, 0.9, nesterov, next_velocity)
    if scale == 1.0:
        assert bool((next_velocity[100:300] == 0).all())
    assert bool((next_velocity[100:200] == 0).all())
    assert torch.equal(next_velocity[:100], before[:100])
    assert torch.equal(next_velocity[300:], before[300:])


@others(*OPS)
@either
def test_masks_agree(kernel, nesterov):
    n = 1001
    velocity, residual = normal(n, 2), normal(n, 3)
    masked = []
    for each in (kernel, reference):
        next_velocity, total = added(each, n, 0.9, nesterov)
        steps = torch.arange(n) % 9 - 4
        rest = total * (1 + steps * 2.0**-22)  # around the limit
        each.mask_sent(velocity, residual, rest, 0.9, nesterov, next_velocity)
        masked.append(next_velocity)
    assert torch.equal(masked[0], masked[1])
    assert 0 < int((masked[0] == 0).sum()) < n


@both
def test_lengths_must_agree(kernel):
    a, b = torch.zeros(3), torch.zeros(4)
    with pytest.raises(ValueError, match="same length"):
        kernel.add_momentum(a, a, b, 0.9, False, a.clone(), a.clone())
    with pytest.raises(ValueError, match="same length"):
        kernel.mask_sent(a, a, b, 0.9, False, a.clone())
