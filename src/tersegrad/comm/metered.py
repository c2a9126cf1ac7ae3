"""Metered: a Comm that counts what passes through it, and the time that it takes."""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tersegrad.comm.traffic import (
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    broadcast_traffic,
    shift_traffic,
)
from tersegrad.core import Comm, Pending, Signer

T = TypeVar("T")


class Tap(Comm):
    """Passes every collective on to another Comm, and is told what it put on the wire."""

    def __init__(self, inner: Comm):
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size

    @property
    def shared(self) -> dict[str, Any]:
        """That of ``inner``."""
        return self.inner.shared

    @property
    def signer(self) -> Signer:
        """See Comm."""
        return self.inner.signer

    def name(self, rank: int) -> int:
        """See Comm."""
        return self.inner.name(rank)

    def same_on_all(self, compute: Callable[[], T], out: Tensor) -> T:
        """See Comm."""
        return self.inner.same_on_all(compute, out)

    @abstractmethod
    def observe(self, traffic: Traffic, started: float, overlapped: float = 0.0) -> None:
        """Called after each collective.

        Args:
            traffic: What it put on the wire.
            started: ``perf_counter`` of its beginning.
            overlapped: Seconds since then in which the worker did something else.
        """

    def start_all_reduce(self, x: Tensor) -> Pending:
        """See Comm; it is observed when it has been waited for."""
        started = time.perf_counter()
        traffic = all_reduce_traffic(self.size, x.numel() * x.element_size())
        return _Observed(self.inner.start_all_reduce(x), self, traffic, started)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See Comm."""
        started = time.perf_counter()
        gathered = self.inner.all_gather(x)
        lengths = [g.numel() for g in gathered]
        self.observe(all_gather_traffic(self.size, lengths, self.rank, with_sizes=True), started)
        return gathered

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        """See Comm; it is observed when it has been waited for."""
        started = time.perf_counter()
        pending = self.inner.start_shift(x, into, by)
        return _Observed(pending, self, shift_traffic(self.size, x.numel(), by), started)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """See Comm."""
        started = time.perf_counter()
        self.inner.broadcast(x, root)
        nbytes = x.numel() * x.element_size()
        self.observe(broadcast_traffic(self.size, nbytes, self.rank, root), started)


class _Observed(Pending):
    """A message that a tap is told about."""

    def __init__(self, inner: Pending, tap: Tap, traffic: Traffic, started: float):
        self._inner, self._tap, self._traffic, self._started = inner, tap, traffic, started
        self._posted = time.perf_counter()

    def wait(self) -> Tensor:
        """See Pending."""
        overlapped = time.perf_counter() - self._posted
        received = self._inner.wait()
        self._tap.observe(self._traffic, self._started, overlapped)
        return received

    def future(self) -> "torch.futures.Future[Any] | None":
        """See Pending. It is observed now, with no time: whoever takes the future knows how long that takes."""
        future = self._inner.future()
        if future is not None:
            self._tap.observe(self._traffic, time.perf_counter())
        return future


@dataclass
class Meter:
    """Totals of one collective, or of one bucket."""

    calls: int = 0
    payload: int = 0  # bytes handed to collectives
    sent: int = 0  # bytes that left this worker
    seconds: float = 0.0  # time in collectives
    overlapped: float = 0.0  # time that messages were under way while the worker did something else

    def add(self, traffic: Traffic, seconds: float, overlapped: float) -> None:
        """Counts one call."""
        self.calls += 1
        self.payload += traffic.payload
        self.sent += traffic.sent
        self.seconds += seconds
        self.overlapped += overlapped


@dataclass
class Timing:
    """Where the time of a reduction went: before its first collective, in collectives, and everything else."""

    encode: float = 0.0
    wait: float = 0.0
    decode: float = 0.0


@dataclass
class Span:
    """The time that was spent on one bucket, without a break or with several."""

    bucket: int
    started: float
    resumed: float  # when the present part began
    spent: float = 0.0  # seconds in the parts before
    first_collective: float | None = None
    waited: float = 0.0


class Metered(Tap):
    """Counts real bytes and time per collective and per bucket. Any thread may add to the totals.

    ``begin``, ``pause``, ``resume`` and ``end`` belong to the one thread that reduces buckets.
    """

    def __init__(self, inner: Comm):
        super().__init__(inner)
        self.total = Meter()
        self.by_collective: dict[str, Meter] = {}
        self.by_bucket: dict[int, Meter] = {}
        self.timing = Timing()
        self._span: Span | None = None
        self._lock = threading.Lock()

    def begin(self, bucket: int) -> None:
        """What follows is for this bucket."""
        now = time.perf_counter()
        self._span = Span(bucket, now, now)

    def pause(self) -> Span:
        """The bucket has to wait for its messages, and another one may begin."""
        assert self._span is not None
        span, self._span = self._span, None
        span.spent += time.perf_counter() - span.resumed
        return span

    def resume(self, span: Span) -> None:
        """Back to a bucket that was paused."""
        span.resumed = time.perf_counter()
        self._span = span

    def end(self) -> None:
        """The bucket is done: its time is split."""
        span = self.pause()
        whole = span.spent
        encode = whole if span.first_collective is None else span.first_collective - span.started
        with self._lock:
            self.timing.encode += encode
            self.timing.wait += span.waited
            self.timing.decode += whole - encode - span.waited

    def add_wait(self, seconds: float) -> None:
        """Counts time in collectives of which no thread waited for the end."""
        with self._lock:
            self.timing.wait += seconds

    def observe(self, traffic: Traffic, started: float, overlapped: float = 0.0) -> None:
        """Adds one call to every total it belongs to."""
        seconds = time.perf_counter() - started - overlapped
        span = self._span
        with self._lock:
            self.total.add(traffic, seconds, overlapped)
            self.by_collective.setdefault(traffic.collective, Meter()).add(traffic, seconds, overlapped)
            if span is not None:
                self.by_bucket.setdefault(span.bucket, Meter()).add(traffic, seconds, overlapped)
        if span is not None:
            span.waited += seconds
            if span.first_collective is None:
                span.first_collective = started
