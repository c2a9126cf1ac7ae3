"""Layout: which tensors a bucket holds. Step: what is known about one bucket in one training step."""

import builtins
import hashlib
import math
from collections.abc import Container
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """One contiguous gradient buffer: the tensors in it, in order, and where it lives. It never changes.

    Args:
        names: Of the tensors, as the model calls them.
        shapes: Of the tensors.
        seed: All randomness of a method comes from (seed, id, rank) and the method's own counters.
        device: Where the bucket, the state and the scratch live.
        dtype: Of the vector that methods are given.

    >>> layout = Layout(("w", "b"), ((2, 3), (3,)))
    >>> layout.numel, layout.offsets
    (9, (0, 6, 9))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    seed: int = 0
    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    place: tuple[int, int, int] | None = field(default=None, repr=False)  # of a slice: id of the whole, start, end

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor begins, and where the last one ends."""
        offsets = [0]
        for size in self.sizes:
            offsets.append(offsets[-1] + size)
        return tuple(offsets)

    @cached_property
    def id(self) -> int:
        """A hash of names and shapes: the same on every worker."""
        if self.place is not None:
            return mix_seed(*self.place)  # two slices of one tensor have the same names and shapes
        text = repr((self.names, self.shapes)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.offsets[-1]

    def subset(self, members: list[int]) -> "Layout":
        """The layout of only these tensors (by position), packed without gaps."""
        names, shapes = tuple(self.names[i] for i in members), tuple(self.shapes[i] for i in members)
        return replace(self, names=names, shapes=shapes, place=None)

    def slice(self, start: int, stop: int) -> "Layout":
        """The layout of the elements from ``start`` to ``stop``; a tensor that is split is there in part.

        Such a part is flat, unless it is made of whole rows.

        >>> part = Layout(("w", "b"), ((7,), (3,))).slice(5, 10)
        >>> part.names, part.sizes
        (('w', 'b'), (2, 3))
        >>> Layout(("w",), ((7, 5, 3),)).slice(15, 60).shapes, Layout(("w",), ((7, 5, 3),)).slice(16, 61).shapes
        (((3, 5, 3),), ((45,),))
        """
        names, shapes = [], []
        for name, shape, begin, end in zip(self.names, self.shapes, self.offsets, self.offsets[1:], strict=False):
            inside = min(end, stop) - max(begin, start)
            if inside > 0:
                names.append(name)
                row = math.prod(shape[1:])
                whole_rows = len(shape) > 1 and inside % row == max(start - begin, 0) % row == 0
                part = (inside // row, *shape[1:]) if whole_rows else (inside,)
                shapes.append(shape if inside == end - begin else part)
        return replace(self, names=tuple(names), shapes=tuple(shapes), place=(self.id, start, stop))

    def ranges(self, names: Container[str]) -> "list[builtins.slice]":
        """Where these tensors are in the bucket."""
        ends = zip(self.names, self.offsets, self.offsets[1:], strict=False)
        return [builtins.slice(start, stop) for name, start, stop in ends if name in names]

    @staticmethod
    def flat(numel: int, name: str = "x", seed: int = 0) -> "Layout":
        """A single vector."""
        return Layout((name,), ((numel,),), seed)

    def zeros(self) -> Tensor:
        """A float32 vector of zeros, as long as the bucket and where it lives."""
        return torch.zeros(self.numel, device=self.device)


@dataclass(frozen=True)
class Step:
    """One bucket in one training step: what changes from step to step, beside the gradient itself.

    Args:
        layout: The bucket.
        number: Of the step.
        lr: The optimizer's learning rate, where it is known.
        squares: The sum over samples of squared gradients, for methods that need it.
        idle: Tensors that this worker has no gradient of in this step. What is remembered of them is not sent, because
            the host may throw their mean away: it stays for a step in which they are used. None if that never happens.
    """

    layout: Layout
    number: int = 0
    lr: float | None = None
    squares: Tensor | None = field(default=None, repr=False, compare=False)
    idle: frozenset[str] | None = None

    def on(self, layout: Layout, squares: Tensor | None = None) -> "Step":
        """The same step for another bucket, e.g. for some of this one's tensors."""
        return Step(layout, self.number, self.lr, squares, self.idle)

    def idle_slices(self) -> list[slice]:
        """Where the idle tensors are in the bucket."""
        return self.layout.ranges(self.idle) if self.idle else []


def mix_seed(*parts: int) -> int:
    """One 63-bit seed out of several numbers.

    >>> mix_seed(1, 2) == mix_seed(2, 1)
    False
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
