"""Throttled: a Comm that is as slow as a given link."""

import time
from dataclasses import dataclass, field

from tersegrad.comm.metered import Tap
from tersegrad.comm.traffic import Traffic
from tersegrad.comm.units import parse_rate, parse_time
from tersegrad.core import Comm


@dataclass(frozen=True)
class Throttled:
    """An emulated slow link: ``Throttled("100Mbit", latency="1ms")(comm)`` is the same Comm, as slow as that link.

    Each collective takes at least (bytes that leave the worker) / bandwidth + (messages in a row) * latency, in the
    pattern of the collective itself (``comm/traffic.py``). The time counts from its start: what a worker does before it
    waits costs nothing. Messages that are under way together share the bandwidth, one after the other, and the latency
    not at all.

    Args:
        bandwidth: Such as "100Mbit" or "20MB/s"; None for unlimited.
        latency: One way, such as "5ms".
    """

    bandwidth: str | None = None
    latency: str = field(default="0s", kw_only=True)

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

    def observe(self, traffic: Traffic, started: float, overlapped: float = 0.0) -> None:
        """Waits until the link would have been done."""
        self._free = max(started, self._free) + self.link.seconds(traffic.sent, 0)
        due = self._free + self.link.seconds(0, traffic.hops)
        time.sleep(max(0.0, due - time.perf_counter()))
