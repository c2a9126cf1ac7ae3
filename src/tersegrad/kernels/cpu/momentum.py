"""Momentum that is accumulated before sending, each step in one pass over memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.momentum``.
"""

import numba
import numpy as np
from torch import Tensor

from tersegrad.kernels import ops
from tersegrad.kernels.cpu._arrays import Floats, array, f32
from tersegrad.kernels.ops import check_lengths

__all__ = ["add_momentum", "mask_sent"]

SENT = np.float32(ops.SENT)


def add_momentum(
    gradient: Tensor,
    velocity: Tensor,
    residual: Tensor,
    momentum: float,
    nesterov: bool,
    next_velocity: Tensor,
    total: Tensor,
) -> None:
    """``next_velocity = momentum * velocity + gradient`` and ``total = residual + increment``."""
    check_lengths(gradient, velocity, residual, next_velocity, total)
    kernel = _add_nesterov if nesterov else _add
    before = array(gradient), array(velocity), array(residual)
    kernel(*before, f32(momentum), array(next_velocity), array(total))


def mask_sent(
    velocity: Tensor, residual: Tensor, rest: Tensor, momentum: float, nesterov: bool, next_velocity: Tensor
) -> None:
    """``next_velocity = 0`` wherever more than 2^-20 of the total was sent."""
    check_lengths(velocity, residual, rest, next_velocity)
    if nesterov:
        _mask_nesterov(array(velocity), array(residual), array(rest), f32(momentum), array(next_velocity))
    else:
        _mask(array(residual), array(rest), array(next_velocity))


@numba.njit(nogil=True, cache=True)
def _add(
    gradient: Floats, velocity: Floats, residual: Floats, m: np.float32, next_velocity: Floats, total: Floats
) -> None:
    for i in range(gradient.size):
        new = m * velocity[i] + gradient[i]
        next_velocity[i] = new
        total[i] = residual[i] + new


@numba.njit(nogil=True, cache=True)
def _add_nesterov(
    gradient: Floats, velocity: Floats, residual: Floats, m: np.float32, next_velocity: Floats, total: Floats
) -> None:
    for i in range(gradient.size):
        old = m * velocity[i]
        new = old + gradient[i]
        next_velocity[i] = new
        total[i] = residual[i] + ((new - old) + m * new)


@numba.njit(nogil=True, cache=True)
def _mask(residual: Floats, rest: Floats, next_velocity: Floats) -> None:
    for i in range(rest.size):
        new = next_velocity[i]
        total = residual[i] + new
        next_velocity[i] = f32(0) if abs(total - rest[i]) > abs(total) * SENT else new


@numba.njit(nogil=True, cache=True)
def _mask_nesterov(velocity: Floats, residual: Floats, rest: Floats, m: np.float32, next_velocity: Floats) -> None:
    for i in range(rest.size):
        new = next_velocity[i]
        total = residual[i] + ((new - m * velocity[i]) + m * new)
        next_velocity[i] = f32(0) if abs(total - rest[i]) > abs(total) * SENT else new
