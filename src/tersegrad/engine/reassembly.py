"""After a restart: buckets as they were when the state was saved, put together from those that the host makes now.

A host may begin every process with other buckets than it ends with. Methods that look at a bucket as a whole would then
go on otherwise than without the restart. So the saved buckets are assembled until the host makes them itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tersegrad.engine.gradient import Gradient

STEPS_TO_REBUILD = 3  # DDP makes its final buckets after the first step, or the second with a static graph


@dataclass(frozen=True)
class _Member:
    """One tensor of a gradient that was handed over."""

    gradient: Gradient
    start: int
    stop: int

    def slice(self, whole: Tensor) -> Tensor:
        return whole[self.start : self.stop]


class Reassembly:
    """Holds gradients back that are not in saved buckets, until all of the step are there."""

    def __init__(self, numel: dict[str, int], required: frozenset[str]):
        self._numel = numel
        self._required = required
        self.saved: list[list[str]] = []  # names in the saved buckets; empty if there are none to be assembled
        self._loaded_at = 0
        self._held: list[Gradient] = []

    def load(self, buckets: list[list[str]], step: int) -> None:
        """Begins to assemble these buckets, if they hold the model's tensors."""
        buckets = [names for names in buckets if names]
        names = {name for bucket in buckets for name in bucket}
        self.saved, self._loaded_at = buckets if self._required <= names <= set(self._numel) else [], step

    def is_over(self, step: int) -> bool:
        """Whether the host's buckets are known to be the final ones."""
        return not self.saved and step - self._loaded_at >= STEPS_TO_REBUILD

    def holds(self, gradient: Gradient) -> bool:
        """Takes a gradient that is not one of the saved buckets; False if it is to be reduced as it is."""
        if not self.saved or list(gradient.names) in self.saved:
            return False
        self._held.append(gradient)
        return True

    def assembled(self, step: int) -> Iterator[tuple[Gradient, Callable[[], None]]]:
        """The saved buckets of what was held, each with a function that puts its mean back where it came from."""
        if self._held:
            members = {name: member for gradient in self._held for name, member in self._members(gradient)}
            found = [names for names in self.saved if names[0] in members]
            if sorted(name for names in found for name in names) == sorted(members):
                for names in found:
                    yield _assemble([members[name] for name in names], tuple(names))
            else:  # the host has other tensors in its buckets now
                self.saved = []
                yield from ((gradient, _nothing) for gradient in self._held)
            self._held.clear()
        if step - self._loaded_at >= STEPS_TO_REBUILD:
            self.saved = []

    def _members(self, gradient: Gradient) -> Iterator[tuple[str, _Member]]:
        start = 0
        for name in gradient.names:
            yield name, _Member(gradient, start, start + self._numel[name])
            start += self._numel[name]


def _nothing() -> None:
    """The mean is where it belongs."""


def _assemble(members: list[_Member], names: tuple[str, ...]) -> tuple[Gradient, Callable[[], None]]:
    about = members[0].gradient
    buffers = [member.slice(member.gradient.buffer) for member in members]
    squares = [member.slice(member.gradient.squares) for member in members if member.gradient.squares is not None]
    whole = replace(about, names=names, buffer=torch.cat(buffers), squares=torch.cat(squares) if squares else None)

    def put_back() -> None:
        torch._foreach_copy_(buffers, whole.buffer.split([b.numel() for b in buffers]))
        for part in squares:
            part.zero_()

    return whole, put_back
