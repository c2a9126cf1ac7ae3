"""Comms around a Comm: one counts what passes (Metered), one makes it slow (Throttled)."""

import time
from abc import abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from tersegrad import comm as patterns
from tersegrad.comm import Traffic
from tersegrad.core import Comm, Pending
from tersegrad.units import parse_rate, parse_time


class Tap(Comm):
    """Passes every collective on to another Comm, and sees what it put on the wire."""

    def __init__(self, inner: Comm):
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size

    @abstractmethod
    def saw(self, traffic: Traffic, started: float, overlapped: float = 0.0) -> None:
        """Called after each collective, with the ``perf_counter`` of its beginning.

        ``overlapped`` is how many of the seconds since then the worker did something else.
        """

    def all_reduce(self, x: Tensor) -> None:
        """See Comm."""
        started = time.perf_counter()
        self.inner.all_reduce(x)
        self.saw(patterns.all_reduce_traffic(self.size, x.numel() * x.element_size()), started)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See Comm."""
        started = time.perf_counter()
        gathered = self.inner.all_gather(x)
        lengths = [g.numel() for g in gathered]
        self.saw(patterns.all_gather_traffic(self.size, lengths, self.rank, with_sizes=True), started)
        return gathered

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        """See Comm; it is seen when it has been waited for."""
        started = time.perf_counter()
        pending = self.inner.start_shift(x, into, by)
        return _Seen(pending, self, patterns.shift_traffic(self.size, x.numel(), by), started)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """See Comm."""
        started = time.perf_counter()
        self.inner.broadcast(x, root)
        nbytes = x.numel() * x.element_size()
        self.saw(patterns.broadcast_traffic(self.size, nbytes, self.rank, root), started)


class _Seen(Pending):
    """A message that is seen by a tap."""

    def __init__(self, inner: Pending, tap: Tap, traffic: Traffic, started: float):
        self._inner, self._tap, self._traffic, self._started = inner, tap, traffic, started
        self._posted = time.perf_counter()

    def wait(self) -> Tensor:
        """See Pending."""
        overlapped = time.perf_counter() - self._posted
        received = self._inner.wait()
        self._tap.saw(self._traffic, self._started, overlapped)
        return received


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
    """Where the time of ``reduce`` went: before its first collective, in collectives, and everything else."""

    encode: float = 0.0
    wait: float = 0.0
    decode: float = 0.0


@dataclass
class Span:
    """The time that was spent on one bucket, in one go or in several."""

    bucket: int
    started: float
    resumed: float  # when the present go began
    spent: float = 0.0  # seconds in those before
    first_collective: float | None = None
    waited: float = 0.0


class Metered(Tap):
    """Counts real bytes and time per collective and per bucket."""

    def __init__(self, inner: Comm):
        super().__init__(inner)
        self.total = Meter()
        self.by_collective: dict[str, Meter] = {}
        self.by_bucket: dict[int, Meter] = {}
        self.timing = Timing()
        self._span: Span | None = None

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
        self.timing.encode += encode
        self.timing.wait += span.waited
        self.timing.decode += whole - encode - span.waited

    def saw(self, traffic: Traffic, started: float, overlapped: float = 0.0) -> None:
        """Adds one call to every total it belongs to."""
        seconds = time.perf_counter() - started - overlapped
        self.total.add(traffic, seconds, overlapped)
        self.by_collective.setdefault(traffic.collective, Meter()).add(traffic, seconds, overlapped)
        if self._span is not None:
            self.by_bucket.setdefault(self._span.bucket, Meter()).add(traffic, seconds, overlapped)
            self._span.waited += seconds
            if self._span.first_collective is None:
                self._span.first_collective = started


@dataclass(frozen=True)
class Throttled:
    """An emulated slow link: ``Throttled("100Mbit", latency="1ms")(comm)`` is the same Comm, as slow as that link.

    Each collective takes at least (bytes that leave the worker) / bandwidth + (messages in a row) * latency, in the
    pattern of the collective itself (``comm.py``). The time counts from its start: what a worker does before it waits
    costs nothing. Messages that are under way together share the bandwidth, one after the other, and the latency
    not at all.
    """

    bandwidth: str | None = None  # None: unlimited
    latency: str = field(default="0s", kw_only=True)  # one way

    def __post_init__(self) -> None:
        self.seconds(0, 0)  # refuses what cannot be read, here and not in the first step

    def seconds(self, nbytes: int, hops: int) -> float:
        """How long this link needs."""
        transfer = nbytes / parse_rate(self.bandwidth) if self.bandwidth else 0.0
        return transfer + hops * parse_time(self.latency)

    def __call__(self, inner: Comm) -> Comm:
        """The same Comm over this link."""
        return _SlowComm(inner, self)


class _SlowComm(Tap):
    """See Throttled."""

    def __init__(self, inner: Comm, link: Throttled):
        super().__init__(inner)
        self.link = link
        self._free = 0.0  # when the link has sent all that it was given

    def saw(self, traffic: Traffic, started: float, overlapped: float = 0.0) -> None:
        """Waits until the link would have been done."""
        self._free = max(started, self._free) + self.link.seconds(traffic.sent, 0)
        due = self._free + self.link.seconds(0, traffic.hops)
        time.sleep(max(0.0, due - time.perf_counter()))
