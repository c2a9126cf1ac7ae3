"""When the workers lose each other: whose fault it was, told on every worker that is still there.

gloo says "connection closed by peer" or "timed out", and not by whom. So whoever fails pins a note to a board that all
workers can read (the store of the process group's rendezvous), and reads the others' notes for a short while: a rank
that pinned an error of its own is to blame; one that says nothing is dead, hangs, or cannot be reached.
"""

import time

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # as torch.distributed, which does not export it to type checkers

from tersegrad.comm import NetworkError

GRACE = 5.0  # seconds in which the others' notes are awaited: they notice a loss not all at once
_PAUSE = 0.02


class Board:
    """Notes of the ranks of one group about how they failed."""

    def __init__(self, group: dist.ProcessGroup, grace: float = GRACE):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.grace = grace
        store = dist.distributed_c10d._get_default_store()
        self._store = PrefixStore(f"tersegrad/{group.group_name}", store)

    def explain(self, error: BaseException) -> BaseException:
        """Pins the error to the board. An error of the network is given the reason that the board tells."""
        network = isinstance(error, NetworkError)
        try:
            kind = "lost" if network else "failed"
            self._store.set(f"rank {self.rank}", f"{kind}: {type(error).__name__}: {error}"[:2000])
            if not network or self.size == 1:
                return error
            notes = self._read()
        except Exception:  # the store went with the process that holds it
            return NetworkError(
                f"the workers have lost each other, and the process that holds the rendezvous (rank 0, unless torchrun "
                f"holds it) cannot be reached either. This rank, {self.rank}, saw: {error}"
            )
        return NetworkError(f"{self._reason(notes)} This rank, {self.rank}, saw: {error}")

    def _read(self) -> dict[int, str]:
        """The others' notes, as soon as all are there or the time is over."""
        deadline = time.monotonic() + self.grace
        others = [rank for rank in range(self.size) if rank != self.rank]
        while True:
            pinned = [rank for rank in others if self._store.check([f"rank {rank}"])]
            if len(pinned) == len(others) or time.monotonic() > deadline:
                return {rank: self._store.get(f"rank {rank}").decode(errors="replace") for rank in pinned}
            time.sleep(_PAUSE)

    def _reason(self, notes: dict[int, str]) -> str:
        failed = [f"rank {rank} {note}." for rank, note in notes.items() if note.startswith("failed")]
        if failed:
            return " ".join(failed)
        silent = [str(rank) for rank in range(self.size) if rank != self.rank and rank not in notes]
        if silent:
            who = f"rank {silent[0]} does" if len(silent) == 1 else f"ranks {', '.join(silent)} do"
            return f"{who} not answer: ended, killed, hanging, or out of reach."
        return (
            "all ranks are there, but lost contact: a link was down for longer than the timeout, or one was too slow."
        )
