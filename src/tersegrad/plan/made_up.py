"""Made-up gradients of several workers over many steps, from one vector: a signal that stays, and noise around it."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tersegrad.core import Layout, mix_seed

NOISE = 4.0  # times the signal: about what single batches of a small net have
SAMPLES = 32  # in a worker's batch, for the squares of single samples
RANK = 4  # outer products in the Gaussian signal: gradients of layers have few directions
WHITE = 0.05  # size of what has no such structure, relative to the signal


@dataclass(frozen=True)
class Gradients:
    """What every worker's batch gives in every step: signal + noise.

    The noise is the signal with its rows shuffled and their signs drawn anew, ``NOISE`` times as large. So it has the
    directions of the signal, as that of a real layer has, and is another one for each worker and step.
    """

    signal: Tensor
    layout: Layout

    def of(self, rank: int, step: int) -> Tensor:
        """One worker's gradient in one step."""
        chance = torch.Generator().manual_seed(mix_seed(rank, step))
        return torch.cat([_noisy(part, shape, chance) for part, shape in self._tensors])

    @cached_property
    def squares(self) -> Tensor:
        """The sum over a batch of the squares of single samples' gradients, each divided by the size of the batch."""
        parts = [part.square() / SAMPLES + NOISE**2 * part.square().mean() for part, _ in self._tensors]
        return torch.cat(parts)

    @property
    def _tensors(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        return list(zip(self.signal.split(self.layout.sizes), self.layout.shapes, strict=True))

    def __str__(self) -> str:
        shapes = " and ".join("x".join(map(str, shape)) for shape in self.layout.shapes)
        return f"made-up gradients of {shapes}: the vector, and noise of {NOISE:g} times its size"


def _noisy(part: Tensor, shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
    rows = part.view(shape[0] if len(shape) > 1 else 1, -1)
    order = torch.randperm(rows.shape[0], generator=chance)
    signs = torch.randint(0, 2, (rows.shape[0] if len(shape) > 1 else rows.shape[1],), generator=chance)
    signs = signs.mul_(2).sub_(1).float()
    noise = rows[order] * (signs[:, None] if len(shape) > 1 else signs)
    return torch.add(rows, noise, alpha=NOISE).view(-1)


def layout_of(numel: int) -> Layout:
    """A convolution of 3x3, about as many channels in as out, in whole 64s; and a vector of what is left over.

    >>> layout_of(100_000).shapes
    ((64, 128, 3, 3), (26272,))
    """
    outputs = math.isqrt(numel // 9)
    unit = next(unit for unit in (64, 8, 1) if unit <= max(1, outputs))
    outputs -= outputs % unit
    inputs = numel // (9 * outputs) // unit * unit if outputs else 0
    shapes = {"weight": (outputs, inputs, 3, 3), "rest": (numel - 9 * outputs * inputs,)}
    shapes = {name: shape for name, shape in shapes.items() if math.prod(shape)}
    return Layout(tuple(shapes), tuple(shapes.values()))


def gaussian(layout: Layout, seed: int) -> Gradients:
    """A Gaussian signal; that of a matrix or a convolution is a sum of outer products, and a little of all else."""
    chance = torch.Generator().manual_seed(seed)
    return Gradients(torch.cat([_signal(shape, chance) for shape in layout.shapes]), layout)


def _signal(shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
    numel = math.prod(shape)
    if len(shape) < 2:
        return torch.randn(numel, generator=chance)
    rest = torch.ones(RANK, 1)
    for length in shape[1:]:
        rest = (rest[:, :, None] * torch.randn(RANK, 1, length, generator=chance)).flatten(1)
    structured = torch.randn(shape[0], RANK, generator=chance) @ rest / math.sqrt(RANK)
    return structured.view(-1).add_(torch.randn(numel, generator=chance), alpha=WHITE)
