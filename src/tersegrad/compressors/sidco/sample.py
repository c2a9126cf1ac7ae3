"""Moments of the magnitudes of a vector above a threshold."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import State, scratch

SAMPLE = 1 << 20  # elements that are enough to fit a distribution to
SLICE = 1024  # consecutive elements of a sample


@dataclass(frozen=True)
class Tail:
    """Moments of the excess over a threshold."""

    count: float
    mean: float
    variance: float


class Sample:
    """Moments of the magnitudes of a vector: one pass per threshold.

    Of a vector much longer than ``SAMPLE``, evenly spaced slices are packed once per step and used instead: passes
    become cheap. The moments are then off by a few tenths of a per cent, which the controller corrects.
    """

    def __init__(self, x: Tensor, state: State):
        every = x.numel() // SAMPLE
        self._x = x if every < 2 else _packed_slices(x, every, state)
        self._scale = x.numel() / self._x.numel()
        self._tails: dict[float, Tail] = {}
        self.finite = math.isfinite(self.tail(0.0).mean)

    def tail(self, threshold: float) -> Tail:
        """Count (in the whole vector), mean and unbiased variance of |x| - threshold where |x| > threshold."""
        if threshold not in self._tails:
            count, total, squares = kernels.read(*kernels.on(self._x).abs_sums(self._x, threshold))
            mean = total / count if count else 0.0
            variance = max(0.0, (squares - total * mean) / (count - 1)) if count > 1 else 0.0
            self._tails[threshold] = Tail(count * self._scale, mean - threshold if count else 0.0, variance)
        return self._tails[threshold]

    def mean_log(self) -> float:
        """Mean of ln |x| over the non-zero elements."""
        (total,) = kernels.read(kernels.on(self._x).abs_log_sum(self._x))
        return total * self._scale / self.tail(0.0).count


def _packed_slices(x: Tensor, every: int, state: State) -> Tensor:
    """One of every ``every`` slices of the vector, in scratch; which one changes from step to step."""
    groups = x.numel() // (every * SLICE)
    group = torch.arange(groups, device=x.device)
    # Hashed: slices at a fixed distance would sample the same columns of every row of a matrix.
    chosen = group * every + ((group * 0x9E3779B1 + state["calls"] * 0x85EBCA6B) % 0xFFFFFFFB >> 7) % every
    packed = scratch(state, "sample", groups * SLICE, torch.float32, x.device)
    whole = x[: groups * every * SLICE].view(-1, SLICE)
    torch.index_select(whole, 0, chosen, out=packed.view(groups, SLICE))
    return packed
