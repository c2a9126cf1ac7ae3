"""Comm: the only way out of the process."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tersegrad.core.signer import UNSIGNED, Signer

T = TypeVar("T")


class Pending(ABC):
    """A message on its way: what it sends must stay as it is, and where it arrives must not be read, until ``wait``."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Returns where the message arrived, once it is there and the one that went out has left. To be called once."""

    def future(self) -> "torch.futures.Future[Any] | None":
        """Completes when ``wait`` would return at once, and fails as it would; None if there is no such thing.

        For hosts that must not block. Whoever takes the future does not call ``wait``, but ``result`` after it.
        """
        return None

    def result(self) -> Tensor:
        """What ``wait`` would return, once the future has completed."""
        return self.wait()


class Comm(ABC):
    """Every call is collective: all workers make the same calls in the same order.

    Tensors that a call returns live in the Comm's own buffers and are valid until its next call.
    """

    rank: int
    size: int

    @abstractmethod
    def start_all_reduce(self, x: Tensor) -> Pending:
        """Begins to make ``x`` the sum over workers, in place, the same bits everywhere."""

    def all_reduce(self, x: Tensor) -> None:
        """``x`` becomes the sum over workers, the same bits everywhere."""
        self.start_all_reduce(x).wait()

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every worker's bytes in rank order; lengths may differ."""

    @abstractmethod
    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        """Begins to send bytes to rank + ``by`` of the ring, and to receive those of rank - ``by`` in ``into``.

        ``into`` is a buffer: what arrives may be shorter, never longer. An empty ``x`` is no message, and none arrives
        in an empty ``into``. Messages between two workers arrive in the order in which they were started.
        """

    def start_all_gather(self, x: Tensor) -> Pending:
        """Begins to bring every worker's ``x`` to all: bytes, of the same length everywhere.

        ``wait`` returns them in rank order, in memory of their own.
        """
        return _Gathering(self, x)

    @property
    def signer(self) -> Signer:
        """Signs this worker's frames, if the workers share a key."""
        return UNSIGNED

    def name(self, rank: int) -> int:
        """What people call a worker of this Comm: its rank among all processes."""
        return rank

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """``x`` becomes the root's ``x``."""

    def same_on_all(self, compute: Callable[[], T], out: Tensor) -> T:
        """Runs ``compute``, which makes of ``out`` what every worker makes of the same messages, to the bit.

        A Comm between workers that share memory may let one of them compute, and the others copy its ``out``.
        """
        return compute()

    @property
    def shared(self) -> dict[str, Any]:
        """Scratch that all buckets over this Comm share; never saved, used by one thread at a time."""
        scratch: dict[str, Any] = self.__dict__.setdefault("_shared", {})
        return scratch


class _Gathering(Pending):
    """An all-gather made of shifts."""

    def __init__(self, comm: Comm, x: Tensor):
        self._all = x.new_empty(comm.size, x.numel())
        self._all[comm.rank] = x
        self._under_way = [
            comm.start_shift(x, self._all[(comm.rank - by) % comm.size], by) for by in range(1, comm.size)
        ]

    def wait(self) -> Tensor:
        """See Pending."""
        for pending in self._under_way:
            pending.wait()
        return self._all.view(-1)


class Buffers:
    """Float32 buffers that all buckets over a Comm share: borrowed for a while, and given back."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @staticmethod
    def of(comm: Comm) -> "Buffers":
        """The ones of this Comm."""
        buffers: Buffers = comm.shared.setdefault("buffers", Buffers())
        return buffers

    def borrow(self, numel: int, device: torch.device) -> Tensor:
        """One of at least ``numel`` elements; contents undefined."""
        fitting = [i for i, b in enumerate(self._free) if b.numel() >= numel and b.device == device]
        if fitting:
            return self._free.pop(fitting[0])
        if self._free:
            self._free.pop()  # too short: a longer one takes its place
        return torch.empty(numel, device=device)

    def give_back(self, buffer: Tensor) -> None:
        """Nobody reads it any more."""
        self._free.append(buffer)
