"""Momentum that is accumulated before sending, in plain torch: the definition fast kernels must meet.

    next_velocity = momentum * velocity + gradient
    total         = residual + next_velocity                                      (heavy ball)
    total         = residual + (gradient + momentum * next_velocity)              (Nesterov)

Nesterov's gradient is taken as ``next_velocity - momentum * velocity``: then the total follows from the velocities
alone, so the sent part is found without a copy and without the gradient. Every operation rounds to float32.
"""

from torch import Tensor

from tersegrad.kernels.ops import SENT, check_lengths

__all__ = ["add_momentum", "mask_sent"]


def add_momentum(
    gradient: Tensor,
    velocity: Tensor,
    residual: Tensor,
    momentum: float,
    nesterov: bool,
    next_velocity: Tensor,
    total: Tensor,
) -> None:
    """Write ``next_velocity`` and ``total``.

    >>> import torch
    >>> velocity, total = torch.empty(2), torch.empty(2)
    >>> one = torch.ones(2)
    >>> add_momentum(one, 2 * one, 5 * one, 0.5, False, velocity, total), velocity.tolist(), total.tolist()
    (None, [2.0, 2.0], [7.0, 7.0])
    """
    check_lengths(gradient, velocity, residual, next_velocity, total)
    next_velocity.copy_(velocity * momentum + gradient)
    total.copy_(residual + _increment(velocity, next_velocity, momentum, nesterov))


def mask_sent(
    velocity: Tensor, residual: Tensor, rest: Tensor, momentum: float, nesterov: bool, next_velocity: Tensor
) -> None:
    """``next_velocity = 0`` wherever more than 2^-20 of the total was sent; ``rest`` is the unsent part of the total.

    >>> import torch
    >>> velocity = torch.tensor([2.0, 2.0])
    >>> mask_sent(torch.zeros(2), 5 * torch.ones(2), torch.tensor([7.0, 0.0]), 0.5, False, velocity), velocity.tolist()
    (None, [2.0, 0.0])
    """
    check_lengths(velocity, residual, rest, next_velocity)
    total = residual + _increment(velocity, next_velocity, momentum, nesterov)
    next_velocity.masked_fill_((total - rest).abs() > total.abs() * SENT, 0.0)


def _increment(velocity: Tensor, next_velocity: Tensor, momentum: float, nesterov: bool) -> Tensor:
    if not nesterov:
        return next_velocity
    return (next_velocity - velocity * momentum) + next_velocity * momentum
