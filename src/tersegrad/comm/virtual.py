"""VirtualComm: N workers of one process, with the results of N gloo processes to the bit."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from tersegrad.comm.threads import Channel
from tersegrad.comm.torch import NetworkError
from tersegrad.core import Comm, Pending

T = TypeVar("T")

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
    """Where the virtual workers of one run meet.

    Their threads take turns: one runs at a time, and the next one goes on where that one has to wait. Threads that all
    run at once would spend their time on waking each other up.
    """

    def __init__(self, size: int):
        self.size = size
        self.compares = False  # every worker computes all by itself, so that results can be compared
        self._turn = threading.Lock()
        self._results: dict[int, tuple[Tensor, Any, int]] = {}  # of ``same_on_all``, and how many have not read them
        self.failure: str | None = None
        self._rounds: dict[int, _Round] = {}
        self._channels = [[Channel() for _ in range(size)] for _ in range(size)]  # [to][from]
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """For a worker's thread: nobody else runs inside, but for those whose turn it is while this one waits."""
        with self._turn:
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside ``turn``: somebody else's turn."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

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
        if not met.complete.is_set():
            with self.waiting():
                met.complete.wait()
        if met.missing:
            raise NetworkError(str(self.failure))

    def same_on_all(self, number: int, compute: Callable[[], T], out: Tensor) -> T:
        """Called by every worker inside its turn: the first one computes, the others copy."""
        if self.compares:
            return compute()
        if number not in self._results:
            answer = compute()
            if self.size > 1:
                self._results[number] = out.clone(), answer, self.size - 1
            return answer
        result, answer, left = self._results.pop(number)
        out.copy_(result)
        if left > 1:
            self._results[number] = result, answer, left - 1
        return answer

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
        self._number = 0  # of the last collective
        self._computed = 0  # how often all workers have made the same of their messages
        self._last: tuple[int, int, Tensor] | None = None  # address, length and copy of what was sent last

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
        message = _Message(self, channel, channel.ticket() if into.numel() else None, into)
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
        """One copy of what is sent several times in a row: it must not change before it is waited for."""
        if self._last is None or self._last[:2] != (x.data_ptr(), x.numel()):
            self._last = x.data_ptr(), x.numel(), x.clone()
        return self._last[2]

    def same_on_all(self, compute: Callable[[], T], out: Tensor) -> T:
        """The first worker computes, unless all are to be compared."""
        self._computed += 1
        return self._hub.same_on_all(self._computed, compute, out)

    def receive(self, channel: Channel, ticket: int) -> Tensor:
        """A message, when it is there."""
        if channel.has(ticket):
            return channel.get(ticket)
        with self._hub.waiting():
            return channel.get(ticket)

    def release(self) -> None:
        """A message has been waited for, so that what was sent may change."""
        self._last = None

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
    def __init__(self, comm: VirtualComm, channel: Channel, ticket: int | None, into: Tensor):
        self._comm, self._channel, self._ticket, self._into = comm, channel, ticket, into

    def wait(self) -> Tensor:
        """See Pending."""
        self._comm.release()
        if self._ticket is None:
            return self._into
        try:
            message = self._comm.receive(self._channel, self._ticket)
        except threading.BrokenBarrierError:
            raise NetworkError(self._comm.failure) from None
        if message.numel() > self._into.numel():
            raise ValueError(f"a message of {message.numel()} bytes for a buffer of {self._into.numel()}.")
        return message
