"""ThreadComm: N workers as threads of one process, so that anything can be tried and tested without a network."""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tersegrad.core import Comm, Pending

T = TypeVar("T")


class Channel:
    """Messages from one worker to another: each receiver takes the one that was its turn when it was started."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()  # None: the sender has failed
        self._arrived: dict[int, Tensor] = {}
        self._count = 0
        self._tickets = 0

    def put(self, message: Tensor | None) -> None:
        """Called by the sender."""
        self._messages.put(message)

    def ticket(self) -> int:
        """Called by the receiver when a message is started: which one of all it will be."""
        self._tickets += 1
        return self._tickets - 1

    def has(self, ticket: int) -> bool:
        """Called by the receiver: whether ``get`` would return at once."""
        return ticket in self._arrived or self._count + self._messages.qsize() > ticket

    def get(self, ticket: int) -> Tensor:
        """Called by the receiver: waits for that message."""
        while ticket not in self._arrived:
            message = self._messages.get()
            if message is None:
                raise threading.BrokenBarrierError
            self._arrived[self._count] = message
            self._count += 1
        return self._arrived.pop(ticket)


class _Hub:
    """Where the workers of one run meet."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.channels = [[Channel() for _ in range(size)] for _ in range(size)]  # [to][from]
        self.handed_over = [0] * size  # bytes that each worker has given to the others, whatever anybody counts

    def abort(self) -> None:
        """Releases everybody who waits for anything."""
        self.barrier.abort()
        for row in self.channels:
            for channel in row:
                channel.put(None)


class _Message(Pending):
    """See ThreadComm.start_shift."""

    def __init__(self, x: Tensor, into: Tensor, channel: Channel, source: int):
        self._x, self.copy = x, x.clone()
        self._into, self._channel, self._source = into, channel, source
        self._ticket = channel.ticket() if into.numel() else -1

    def wait(self) -> Tensor:
        """See Pending."""
        if self._into.numel():
            self._receive()
        if not torch.equal(self._x, self.copy):
            raise ValueError("a message was changed between start_shift() and wait(). Write into another buffer.")
        return self._into

    def _receive(self) -> None:
        message = self._channel.get(self._ticket)
        if message.numel() > self._into.numel():
            raise ValueError(f"rank {self._source} sent {message.numel()} bytes into a buffer of {self._into.numel()}.")
        self._into[: message.numel()].copy_(message)


class _Total(Pending):
    """See ThreadComm.start_all_reduce."""

    def __init__(self, x: Tensor, parts: list[Tensor]):
        self._x, self._before, self._parts = x, x.clone(), parts

    def wait(self) -> Tensor:
        """See Pending."""
        if not _same_bits(self._x, self._before):
            raise ValueError("a vector was changed between start_all_reduce() and wait(). Write into another buffer.")
        self._x.copy_(self._parts[0])
        for part in self._parts[1:]:
            self._x.add_(part)
        return self._x


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class ThreadComm(Comm):
    """A Comm between threads. Sums are made in rank order, so results are the same in every run."""

    def __init__(self, hub: _Hub, rank: int):
        self._hub = hub
        self.rank = rank
        self.size = len(hub.slots)

    @property
    def handed_over(self) -> int:
        """Bytes that this worker has really given to the others so far."""
        return self._hub.handed_over[self.rank]

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Sum in rank order; it is there when it is waited for. What is changed too early is noticed."""
        return _Total(x, self._swap(x.clone()))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Copies of every worker's bytes."""
        return self._swap(x.clone())

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        """A copy in the other worker's channel; it arrives when it is waited for. A change before that is noticed."""
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        message = _Message(x, into, self._hub.channels[self.rank][source], source)
        self._hub.handed_over[self.rank] += x.numel()
        if x.numel():
            self._hub.channels[to][self.rank].put(message.copy)
        return message

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """The root's tensor."""
        x.copy_(self._swap(x.clone(), counts=self.rank == root)[root])

    def _swap(self, mine: Tensor, counts: bool = True) -> list[Tensor]:
        """Everybody's tensor, in rank order."""
        if counts:
            self._hub.handed_over[self.rank] += mine.numel() * mine.element_size()
        self._hub.slots[self.rank] = mine
        self._hub.barrier.wait()
        everybody = list(self._hub.slots)
        self._hub.barrier.wait()  # nobody writes the next object before all have read this one
        return everybody


def run(size: int, work: Callable[[ThreadComm], T]) -> list[T]:
    """Runs ``work(comm)`` on ``size`` workers at once and returns their results in rank order.

    If a worker raises, the others are released from whatever they wait for, and the first error is raised here.

    >>> run(3, lambda comm: comm.rank * comm.size)
    [0, 3, 6]
    """
    hub = _Hub(size)
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def worker(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(hub, rank))
        except threading.BrokenBarrierError:
            pass  # another worker failed and released us; its error is the one to show
        except BaseException as error:
            errors.append((rank, error))
            hub.abort()

    threads = [threading.Thread(target=worker, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda pair: pair[0])[1]
    return results
