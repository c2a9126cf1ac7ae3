"""VirtualComm: N workers of one process, with the results of N gloo processes to the bit."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tersegrad.comm.threads import Channel
from tersegrad.comm.torch import NetworkError
from tersegrad.core import Comm, Pending

_SEGMENT_NBYTES = 1 << 20  # gloo splits its ring into segments of at most this size


def ring_sum(parts: list[Tensor]) -> Tensor:
    """The sum of all workers' vectors, with every addition in the order of gloo's ring.

    gloo cuts the vector into one chunk a worker. Chunk c starts at worker c - 1, travels down the ranks, and is
    complete at worker c: float addition is not associative, so the last bits depend on that order.

    >>> ring_sum([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    tensor([4., 6.])
    """
    size, first = len(parts), parts[0]
    total = torch.empty_like(first)
    chunk = _chunk(first.numel(), first.element_size(), size)
    for owner, out in enumerate(total.split(chunk)):
        here = slice(owner * chunk, owner * chunk + out.numel())
        torch.add(parts[(owner - 1) % size][here], parts[(owner - 2) % size][here], out=out)
        for by in range(3, size + 1):
            out.add_(parts[(owner - by) % size][here])
    return total


def _chunk(numel: int, itemsize: int, size: int) -> int:
    """Elements in one worker's chunk: at least two segments of equal length."""
    longest = itemsize * max(1, _SEGMENT_NBYTES // itemsize)
    segments = _round_up(max(-(-numel * itemsize // longest), 2 * size), size)
    segment = _round_up(-(-numel * itemsize // segments), itemsize)
    return segments // size * segment // itemsize


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass
class _Round:
    """One collective: every worker brings a tensor, and the last one to come completes it."""

    parts: list[Any]
    missing: int
    complete: threading.Event = field(default_factory=threading.Event)
    callbacks: list[Callable[[], None]] = field(default_factory=list)


class Hub:
    """Where the virtual workers of one run meet."""

    def __init__(self, size: int):
        self.size = size
        self.failure: str | None = None
        self._rounds: dict[int, _Round] = {}
        self._channels = [[Channel() for _ in range(size)] for _ in range(size)]  # [to][from]
        self._lock = threading.Lock()

    def channel(self, to: int, source: int) -> Channel:
        """Messages from one worker to another."""
        return self._channels[to][source]

    def bring(self, number: int, rank: int, part: Tensor, merge: Callable[[list[Tensor]], None]) -> _Round:
        """Adds a worker's tensor to the collective of that number; the last worker calls ``merge`` for all."""
        with self._lock:
            if self.failure is not None:
                raise NetworkError(self.failure)
            met = self._rounds.setdefault(number, _Round([None] * self.size, self.size))
            met.parts[rank] = part
            met.missing -= 1
            if met.missing:
                return met
            del self._rounds[number]
        merge(met.parts)
        with self._lock:
            met.complete.set()
            callbacks = list(met.callbacks)
        for callback in callbacks:
            callback()
        return met

    def when_complete(self, met: _Round, callback: Callable[[], None]) -> None:
        """Calls back when all workers have come, on the thread of the last one."""
        with self._lock:
            if not met.complete.is_set():
                met.callbacks.append(callback)
                return
        callback()

    def wait(self, met: _Round) -> None:
        """Waits until all workers have come."""
        met.complete.wait()
        if met.missing:
            raise NetworkError(str(self.failure))

    def abort(self, reason: str) -> None:
        """Releases every worker that waits for another: one of them has failed."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
            left = list(self._rounds.values())
        for met in left:
            met.complete.set()
        for row in self._channels:
            for channel in row:
                channel.put(None)


class VirtualComm(Comm):
    """One of the workers of a Hub. What it receives is shared with other workers: to be read, not written."""

    def __init__(self, hub: Hub, rank: int):
        self._hub = hub
        self.rank = rank
        self.size = hub.size
        self._number = 0  # of the next collective
        self._copies: dict[tuple[int, int], Tensor] = {}  # of messages under way, by address and length

    def _bring(self, x: Tensor, merge: Callable[[list[Tensor]], None] = lambda parts: None) -> _Round:
        self._number += 1
        return self._hub.bring(self._number, self.rank, x, merge)

    def start_all_reduce(self, x: Tensor) -> Pending:
        """In the order of gloo's ring. The last worker to come adds up for all."""
        if self.size == 1 or not x.numel():
            return _Arrived(x)
        return _Total(x, self._hub, self._bring(x, _sum_into_all))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Everybody's bytes, copied once."""
        met = self._bring(x.clone())
        self._hub.wait(met)
        return list(met.parts)

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        """One copy of what goes to several workers; nothing is written into ``into``."""
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        if to == self.rank:
            return _Arrived(x.clone())
        if self._hub.failure is not None:
            raise NetworkError(self._hub.failure)
        channel = self._hub.channel(self.rank, source)
        message = _Message(self, x, channel, channel.ticket() if into.numel() else None, into)
        if x.numel():
            self._hub.channel(to, self.rank).put(self._copy(x))
        return message

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """The root's tensor."""
        met = self._bring(x.clone() if self.rank == root else x)
        self._hub.wait(met)
        if self.rank != root:
            x.copy_(met.parts[root])

    def _copy(self, x: Tensor) -> Tensor:
        """The copy that is under way to another worker already, if it has the same bytes; else a new one."""
        key = x.data_ptr(), x.numel()
        known = self._copies.get(key)
        if known is None or not torch.equal(known, x):
            known = self._copies[key] = x.clone()
        return known

    def release(self, x: Tensor) -> None:
        """A message has been waited for."""
        self._copies.pop((x.data_ptr(), x.numel()), None)

    @property
    def failure(self) -> str:
        """Why other workers can no longer be reached."""
        return str(self._hub.failure)


def _sum_into_all(parts: list[Tensor]) -> None:
    total = ring_sum(parts)
    for part in parts:
        part.copy_(total)


class _Arrived(Pending):
    def __init__(self, x: Tensor):
        self._x = x

    def wait(self) -> Tensor:
        """See Pending."""
        return self._x


class _Total(Pending):
    def __init__(self, x: Tensor, hub: Hub, met: _Round):
        self._x, self._hub, self._met = x, hub, met

    def wait(self) -> Tensor:
        """See Pending."""
        self._hub.wait(self._met)
        return self._x

    def future(self) -> "torch.futures.Future[Any]":
        """Completed by the last worker to come."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._hub.when_complete(self._met, lambda: future.set_result(self._x))
        return future


class _Message(Pending):
    def __init__(self, comm: VirtualComm, x: Tensor, channel: Channel, ticket: int | None, into: Tensor):
        self._comm, self._x, self._channel, self._ticket, self._into = comm, x, channel, ticket, into

    def wait(self) -> Tensor:
        """See Pending."""
        self._comm.release(self._x)
        if self._ticket is None:
            return self._into
        try:
            message = self._channel.get(self._ticket)
        except threading.BrokenBarrierError:
            raise NetworkError(self._comm.failure) from None
        if message.numel() > self._into.numel():
            raise ValueError(f"a message of {message.numel()} bytes for a buffer of {self._into.numel()}.")
        return message
