"""One layer in one step: its phase, its slices, and when a phase ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from tersegrad.core import State, scratch
from tersegrad.reducers.gradiveq.slices import Slicing
from tersegrad.reducers.gradiveq.subspace import Subspace

WARM_UP, LEARN, COMPRESS, REFUSED = "warm-up", "learn", "compress", "refused"


@dataclass
class Layer:
    """One layer in one step."""

    place: int  # index in the bucket
    slicing: Slicing
    memory: State
    phase: str
    x: Tensor
    out: Tensor
    looks: bool = False  # whether its loss is measured in this step
    energy: float = 0.0  # of the slices that were encoded, if it looks
    outside: float = 0.0  # of these, the part outside the basis
    ends: bool = False  # whether it learns again, because its loss is too large

    @cached_property
    def runs(self) -> "list[Run]":
        """A compressed layer in runs of slices that share a basis."""
        fit, found, first = self.memory["fit"], [], 0
        parts = [fit] if "basis" in fit else [fit[f"group {i}"] for i in range(len(fit))]
        for part in parts:
            space = Subspace(**part)
            found.append(Run(self, first, space))
            first += space.count
        return found

    @cached_property
    def size(self) -> int:
        """The number of coefficients."""
        return sum(run.subspace.size for run in self.runs)

    @property
    def local_loss(self) -> float:
        """``|g - mu - U c|^2 / |g|^2`` of this worker's gradient."""
        return max(0.0, self.outside / self.energy) if self.energy else 0.0

    def split(self, x: Tensor, state: State) -> Tensor:
        """All slices of ``x``, in scratch shared by all layers unless they lie in ``x`` as they are."""
        numel = 0 if self.slicing.in_order else x.numel()
        return self.slicing.split(x, scratch(state, "slices", numel, x.dtype, x.device))


class Run(NamedTuple):
    """Consecutive slices of a layer, from ``first`` on, in the subspace of just these."""

    layer: Layer
    first: int
    subspace: Subspace

    def rows(self, first: int, last: int) -> "Run":
        """Some of its slices."""
        if (first, last) == (0, self.subspace.count):
            return self
        return Run(self.layer, self.first + first, self.subspace.rows(first, last))

    def encode(self, c: Tensor, state: State) -> None:
        """``c = U^T (g - mu)``; the layer is told about the loss, if it looks."""
        layer, buffer = self.layer, self._buffer(state)
        for block, here in self._blocks(c):
            slices = block.slices(layer.x, buffer)
            block.subspace.encode(slices, here)
            if layer.looks:
                energy, outside = block.subspace.energies(slices, here)
                layer.energy += energy
                layer.outside += outside

    def decode(self, c: Tensor, x: Tensor, state: State, subtract: bool = False) -> None:
        """``x = U c + mu`` in these slices of the layer, or ``x -= U c + mu``."""
        slicing, buffer = self.layer.slicing, self._buffer(state)
        for block, here in self._blocks(c):
            space = block.subspace
            if slicing.in_order:
                space.decode_in_order(here, block.slices(x, buffer), subtract)
            else:
                slices = buffer[: space.mean.numel()]
                space.decode(here, slices)
                slicing.join(slices, space.mean, x, subtract, block.first)

    def slices(self, x: Tensor, buffer: Tensor) -> Tensor:
        """Its slices, of ``x``."""
        return self.layer.slicing.split(x, buffer, self.first, self.first + self.subspace.count)

    def _blocks(self, c: Tensor) -> "Iterator[tuple[Run, Tensor]]":
        """Blocks of slices with their coefficients."""
        step, count = self._step, self.subspace.count
        d = self.subspace.size // count
        for first in range(0, count, step):
            last = min(first + step, count)
            yield self.rows(first, last), c[first * d : last * d]

    @property
    def _step(self) -> int:
        """Slices in a block; a subspace with several bases is one."""
        count = self.subspace.count
        return count if self.subspace.basis.shape[0] > 1 else min(count, self.layer.slicing.block)

    def _buffer(self, state: State) -> Tensor:
        """Room for the slices of a block, in scratch shared by all layers."""
        x, slicing = self.layer.x, self.layer.slicing
        numel = 0 if slicing.in_order else self._step * slicing.length
        return scratch(state, "slices", numel, x.dtype, x.device)


def drifted(loss: dict[str, float], factor: float, target: float) -> bool:
    """Whether the odds of the loss, loss / (1 - loss), have grown by more than ``factor`` since the first measurement.

    A loss below the target counts as the target. Odds distinguish 2 % from 6 % as well as 92 % from 97 %: on a single
    worker, much of a gradient is noise outside any basis.
    """
    if not loss:
        return False

    def odds(share: float) -> float:
        share = min(max(share, target, 1e-6), 1 - 1e-6)
        return share / (1 - share)

    return odds(loss["recent"]) > factor * odds(loss["first"])
