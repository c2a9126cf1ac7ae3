"""A handle's memory through ``torch.distributed.checkpoint``; apart, because importing that takes a second."""

import io
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.stateful import Stateful

from tersegrad.hosts.handle import Handle


class Shards(Stateful):
    """A handle's memory for ``torch.distributed.checkpoint``, every rank's under a key of its own.

        dcp.save({"model": model.state_dict(), "tersegrad": Shards(handle)}, checkpoint_id=folder)
        dcp.load({"model": weights, "tersegrad": Shards(handle, folder)}, checkpoint_id=folder)

    The folder tells how many ranks saved it; without it as many as now are expected. ``key`` is the name in the dict.
    """

    def __init__(self, handle: Handle, folder: str | None = None, key: str = "tersegrad"):
        self._handle = handle
        self._ranks = None if folder is None else _saved_ranks(folder, key)

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory as bytes; and, where it will be loaded, places for that of the others."""
        buffer = io.BytesIO()
        own = self._handle.state_dict()
        torch.save(own, buffer)
        others = {f"rank {rank}": b"" for rank in range(self._ranks or 0)}
        return {**others, f"rank {own['rank']}": buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hands on what was read."""
        shards = (state_dict[key] for key in state_dict if self._ranks is None or int(key.split()[1]) < self._ranks)
        self._handle.load_state_dict(torch.load(io.BytesIO(shard), weights_only=True) for shard in shards)


def _saved_ranks(folder: str, key: str) -> int:
    found = [
        name for name in FileSystemReader(folder).read_metadata().state_dict_metadata if name.startswith(f"{key}.rank ")
    ]
    if not found:
        raise ValueError(f"{folder} holds nothing under {key!r} that tersegrad saved.")
    return len(found)
