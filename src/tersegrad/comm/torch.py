"""TorchComm: the Comm over ``torch.distributed``."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tersegrad.comm.traffic import padded_length
from tersegrad.core import UNSIGNED, Comm, Pending, Signer

_NO_TAG = 1 << 20  # of a message that nobody sends


class NetworkError(RuntimeError):
    """A message did not arrive, or a worker is gone; what torch.distributed says about it."""


@contextmanager
def _network() -> Iterator[None]:
    """Tells an error of the network from all other RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        raise NetworkError(str(error)) from error


class _Works(Pending):
    """Operations that torch has under way; it holds on to their memory."""

    def __init__(self, works: list[dist.Work | None], sent: Tensor, into: Tensor, timeout: timedelta | None = None):
        self._works = works
        self._timeout = timeout
        self._sent = sent
        self._into = into

    def future(self) -> "torch.futures.Future[Any] | None":
        """Of a single operation."""
        work = self._works[0] if len(self._works) == 1 else None
        return None if work is None else work.get_future()

    def result(self) -> Tensor:
        """See Pending. torch tells the future of an operation before those who wait for the operation."""
        return self._into

    def wait(self) -> Tensor:
        """See Pending."""
        with _network():
            for work in self._works:
                assert work is not None  # None only for a process outside the group
                work.wait() if self._timeout is None else work.wait(self._timeout)
        return self._into


class _Arrived(Pending):
    """A message of a worker to itself."""

    def __init__(self, x: Tensor, into: Tensor):
        into[: x.numel()].copy_(x)
        self._into = into

    def wait(self) -> Tensor:
        """See Pending."""
        return self._into


class TorchComm(Comm):
    """Collectives on a ``torch.distributed`` process group of its own; used by one thread at a time.

    Args:
        group: For the use of this Comm alone.
        timeout: Instead of the group's own, in all operations.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None):
        self.group = group
        self._timeout = timeout  # of messages; that of collectives can be set in the group
        if timeout is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._names = dist.get_process_group_ranks(group)
        self._signer = UNSIGNED
        self._receive_buffer = torch.empty(0, dtype=torch.uint8)
        self._send_buffer = torch.empty(0, dtype=torch.uint8)

    def release(self) -> None:
        """Lets go of the group; the Comm can be asked for its rank and size, and nothing else."""
        del self.group

    def abort(self) -> None:
        """Ends all operations that are under way, in whichever thread, with an error; nothing can be sent afterwards.

        gloo has no call for that, but closes all connections when one message does not arrive in time. On a connection
        that is closed already there is no waiting, so all others are tried.
        """
        never = torch.empty(1, dtype=torch.uint8)
        for by in range(1, self.size):
            with suppress(RuntimeError):
                self.group.recv([never], (self.rank + by) % self.size, _NO_TAG).wait(timedelta(milliseconds=1))

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Sums in place; gloo reduces every part of the ring in one place, so all workers get the same bits."""
        if self.size == 1 or not x.numel():
            return _Works([], x, x)
        with _network():
            return _Works([dist.all_reduce(x, group=self.group, async_op=True)], x, x)

    def start_all_gather(self, x: Tensor) -> Pending:
        """One operation of torch's."""
        everybody = x.new_empty(self.size * x.numel())
        if self.size == 1 or not x.numel():
            return _Works([], x, everybody.copy_(x.repeat(self.size)))
        with _network():
            blocks = list(everybody.split(x.numel()))
            return _Works([dist.all_gather(blocks, x, group=self.group, async_op=True)], x, everybody)

    @property
    def signer(self) -> Signer:
        """See Comm."""
        return self._signer

    def share(self, key: bytes) -> None:
        """From now on frames are signed."""
        self._signer = Signer(key, self.name(self.rank))

    def name(self, rank: int) -> int:
        """See Comm."""
        return self._names[rank]

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Gathers blocks padded to the longest, because gloo refuses uneven ones."""
        if self.size == 1:
            return [x]
        lengths = self._all_sizes(x.numel())
        block_length = padded_length(lengths)
        if block_length == 0:
            return [x] * self.size
        blocks = list(self._receive(self.size * block_length).split(block_length))
        with _network():
            dist.all_gather(blocks, self._padded(x, block_length), group=self.group)
        return [block[:length] for block, length in zip(blocks, lengths, strict=True)]

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        """isend and irecv; gloo lets a message be shorter than its buffer, and matches them in order."""
        if by % self.size == 0:
            return _Arrived(x, into)
        works = []
        with _network():
            if into.numel():
                works.append(dist.irecv(into, group=self.group, group_src=(self.rank - by) % self.size))
            if x.numel():
                works.append(dist.isend(x, group=self.group, group_dst=(self.rank + by) % self.size))
        return _Works(works, x, into, self._timeout)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """In place; ``root`` is a rank of this group."""
        if self.size > 1 and x.numel():
            with _network():
                dist.broadcast(x, group=self.group, group_src=root)

    def _all_sizes(self, nbytes: int) -> list[int]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        with _network():
            dist.all_gather(sizes, torch.tensor([nbytes]), group=self.group)
        return [int(size) for size in sizes]

    def _padded(self, x: Tensor, nbytes: int) -> Tensor:
        if x.numel() == nbytes:
            return x
        if self._send_buffer.numel() < nbytes:
            self._send_buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self._send_buffer[: x.numel()].copy_(x)
        return self._send_buffer[:nbytes]

    def _receive(self, nbytes: int) -> Tensor:
        if self._receive_buffer.numel() < nbytes:
            self._receive_buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._receive_buffer[:nbytes]
