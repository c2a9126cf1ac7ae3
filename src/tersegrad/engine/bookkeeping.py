"""What can be asked of an engine between two steps: figures, saved state, residuals. On the worker's thread."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tersegrad.comm.metered import Metered
from tersegrad.core import Layout, Reducer, State, contribution
from tersegrad.core import state as states
from tersegrad.engine import checkpoint
from tersegrad.engine.buckets import BucketStore
from tersegrad.engine.metrics import metrics_of, residual_norm
from tersegrad.engine.reassembly import Reassembly


class Bookkeeping:
    """Reads and writes the state of all buckets."""

    def __init__(
        self,
        spec: Reducer,
        store: BucketStore,
        reassembly: Reassembly,
        comm: Metered,
        numel: dict[str, int],
        required: frozenset[str],
    ):
        self._spec = spec
        self._store = store
        self._reassembly = reassembly
        self._comm = comm
        self._numel = numel
        self._required = required

    def metrics(self, dense_bytes: int, norms: bool) -> dict[str, Any]:
        """See ``Handle.metrics``."""
        figures = metrics_of(self._spec, self._store, self._comm, dense_bytes)
        return {**figures, "residual_norm": residual_norm(self._spec, self._store)} if norms else figures

    def state_dict(self, step: int, run: str) -> checkpoint.Saved:
        """This rank's state by tensor name."""
        buckets = self._reassembly.saved or [list(entry.layout.names) for entry in self._store.entries()]
        return {
            "format": checkpoint.FORMAT,
            "spec": repr(self._spec),
            "step": step,
            "run": run,
            "rank": self._comm.rank,
            "ranks": self._comm.size,
            "buckets": buckets,
            "tensors": {name: states.copy(piece) for name, piece in self._store.pieces().items()},
        }

    def select(
        self, saved: checkpoint.Saved | checkpoint.Shards, strict: bool
    ) -> tuple[checkpoint.Saved, dict[str, State]]:
        """The one of the saved states that this rank takes up, and its entries; refuses what does not fit."""
        one = checkpoint.select(saved, self._comm.rank, self._comm.size)
        fit = checkpoint.require_fit(one, self._spec, self._numel, self._required, self._store.fresh_piece, strict)
        return one, fit

    def load(self, one: checkpoint.Saved, pieces: dict[str, State], same_buckets: bool) -> None:
        """Takes up a state that ``select`` has found to fit."""
        self._store.load(pieces)
        if not same_buckets:
            self._reassembly.load(one["buckets"], one["step"])

    def flush(self, put: Callable[[str, Tensor], None]) -> None:
        """Sends every residual, uncompressed, and clears it; ``put`` is given each tensor's mean."""
        for group in self._store.groups():
            total = torch.cat([self._taken_out(layout, state) for layout, state in group])
            self._comm.all_reduce(total)
            names = [name for layout, _ in group for name in layout.names]
            parts = total.div_(self._comm.size).split([self._numel[name] for name in names])
            for name, part in zip(names, parts, strict=True):
                put(name, part)

    def _taken_out(self, layout: Layout, state: State) -> Tensor:
        """A copy of the residual, which is zero from now on."""
        residual = self._spec.residual(layout, state)
        copied = layout.zeros() if residual is None else residual.clone()
        self._spec.clear(layout, state)
        states.commit(state)
        return copied

    def residuals(self) -> list[tuple[str, Tensor]]:
        """Every tensor's slice of the residual, until the next step."""
        found: list[tuple[str, Tensor]] = []
        for layout, state in self._store.all_states():
            residual = self._spec.residual(layout, state)
            if residual is not None:
                found += zip(layout.names, residual.split(layout.sizes), strict=True)
        return found

    def energy(self, names: tuple[str, ...], gradient: Tensor) -> float:
        """Sum of squares of what a bucket would send if it sent all: its residual and this gradient."""
        entry = self._store.known(names)
        if entry is None:
            return float(gradient.norm()) ** 2
        total = contribution(self._spec, entry.layout, entry.state, gradient.float(), self._comm.size)
        residual = self._spec.residual(entry.layout, entry.state)
        return float((total if residual is None else total + residual).norm()) ** 2
