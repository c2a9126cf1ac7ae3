"""One step as it goes: backward fills bucket after bucket, and one worker thread sends them in that order."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Service:
    """What one bucket costs the worker thread."""

    seconds: float
    work: float = 0.0  # seconds of it in which the thread keeps a core busy: encoding, decoding


@dataclass(frozen=True)
class Compute:
    """A step without communication."""

    forward: float
    backward: float
    optimizer: float
    ready: tuple[float, ...]  # seconds from the beginning of backward until each bucket is complete, rising
    pace: float = 0.0  # seconds that every step is longer once workers wait for each other, whatever they exchange

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Step:
    """A step with communication."""

    seconds: float
    exposed: float  # seconds of communication and coding by which it is longer than without
    started: tuple[float, ...]  # when the worker took up each bucket, from the beginning of backward
    ended: tuple[float, ...]


def simulate(compute: Compute, services: Sequence[Service], contention: float = 0.0) -> Step:
    """Forward, then backward and the worker side by side until both are done, then the optimizer.

    The worker takes a bucket when the one before is done and backward has filled it. While the worker works (not while
    it waits for the network), backward goes on at 1 - ``contention`` of its speed: 0 where there is a core for each
    of the two, 1 where they share one and the worker's turn comes first.
    """
    now = done = 0.0  # the time, and how far backward has come, in its own seconds
    started, ended = [], []
    for ready, service in zip(compute.ready, services, strict=True):
        pause = max(0.0, ready - done)
        now, done = now + pause, done + pause
        started.append(now)
        now += service.seconds
        done = min(compute.backward, done + service.seconds - contention * service.work)
        ended.append(now)
    now += compute.backward - done
    seconds = compute.forward + now + compute.optimizer + compute.pace
    return Step(seconds, seconds - compute.seconds, tuple(started), tuple(ended))
