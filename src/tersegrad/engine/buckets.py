"""The state of every bucket, found by the names of its tensors, whatever buckets the host makes of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tersegrad.core import Comm, Layout, Reducer, State, needs_of
from tersegrad.core import state as states


@dataclass
class Entry:
    """One bucket as it is reduced now, with its state."""

    layout: Layout
    state: State
    float32: Tensor | None  # copy of a bucket in another dtype; None if it is reduced as it is


class BucketStore:
    """Entries for the host's buckets. When it makes new ones, their state is merged by tensor name."""

    def __init__(self, spec: Reducer, shapes: dict[str, tuple[int, ...]], comm: Comm, seed: int, scaled: bool):
        self._spec = spec
        self._shapes = shapes
        self._comm = comm
        self._seed = seed
        self._as_it_is = not needs_of(spec).float32 and not scaled
        self._entries: dict[tuple[str, ...], Entry] = {}
        self._pieces: dict[str, State] = {}  # by tensor name: state that no bucket has claimed yet

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """One for each bucket so far."""
        return list(self._entries.values())

    def entry(self, names: tuple[str, ...], buffer: Tensor) -> Entry:
        """The entry of a bucket; a new one if the host has not made this bucket before."""
        return self._entries.get(names) or self._new_entry(names, buffer)

    def known(self, names: tuple[str, ...]) -> Entry | None:
        """The entry of a bucket, if the host has made it before."""
        return self._entries.get(names)

    def _new_entry(self, names: tuple[str, ...], buffer: Tensor) -> Entry:
        self._release(names)
        layout = self._layout(names, buffer.device)
        state = self._spec.init(layout, self._comm)
        states.merge(self._pieces, state, layout)
        for name in names:
            self._pieces.pop(name, None)
        copies = buffer.dtype != torch.float32 and not self._as_it_is
        float32 = torch.empty(buffer.numel(), device=buffer.device) if copies else None
        entry = self._entries[names] = Entry(layout, state, float32)
        return entry

    def _release(self, names: tuple[str, ...]) -> None:
        """Splits the state of every bucket that holds one of these tensors into pieces."""
        for key, entry in list(self._entries.items()):
            if not set(names).isdisjoint(key):
                self._pieces |= states.split(entry.state, entry.layout)
                del self._entries[key]

    def _layout(self, names: tuple[str, ...], device: torch.device | None = None) -> Layout:
        shapes = tuple(self._shapes[name] for name in names)
        return Layout(names, shapes, self._seed, device or torch.device("cpu"))

    def groups(self) -> Iterator[list[tuple[Layout, State]]]:
        """Every bucket's state; and together, tensor by tensor, what was loaded and is in no bucket yet.

        The caller may commit to those: they become pieces again when the iteration goes on.
        """
        for entry in self._entries.values():
            yield [(entry.layout, entry.state)]
        if self._pieces:
            unclaimed = [self._state_of(name) for name in self._shapes if name in self._pieces]
            yield unclaimed
            for layout, state in unclaimed:
                self._pieces |= states.split(state, layout)

    def _state_of(self, name: str) -> tuple[Layout, State]:
        """A piece in the form of a state: of its tensor alone, because numbers belong to the bucket that it was in."""
        layout = self._layout((name,))
        state = self._spec.init(layout, self._comm)
        states.merge(self._pieces, state, layout)
        return layout, state

    def all_states(self) -> Iterator[tuple[Layout, State]]:
        """All of the groups' states, to be looked at."""
        for group in self.groups():
            yield from group

    def pieces(self) -> dict[str, State]:
        """All state by tensor name; views of the states' own tensors."""
        pieces = dict(self._pieces)
        for entry in self._entries.values():
            pieces |= states.split(entry.state, entry.layout)
        return pieces

    def load(self, pieces: dict[str, State]) -> None:
        """Takes the place of all that was known."""
        self._pieces = {name: states.copy(piece) for name, piece in pieces.items()}
        self._entries.clear()

    def fresh_piece(self, name: str) -> State:
        """What a tensor's state looks like in the beginning."""
        layout = self._layout((name,))
        return states.split(self._spec.init(layout, self._comm), layout)[name]
