"""Simulation of one step: backward completes bucket after bucket, and one worker thread sends them in that order."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Service:
    """The time of one bucket in the worker thread."""

    seconds: float
    work: float = 0.0  # seconds of it in which the thread keeps a core busy: encoding, decoding


@dataclass(frozen=True)
class Compute:
    """A step without communication."""

    forward: float
    backward: float
    optimizer: float
    ready: tuple[float, ...]  # seconds from the beginning of backward until each bucket is complete, rising
    pace: float = 0.0  # synchronisation overhead: seconds by which waiting for each other lengthens every step

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Step:
    """A step with communication."""

    seconds: float
    exposed: float  # seconds by which communication and coding lengthen it
    started: tuple[float, ...]  # when the worker started each bucket, from the beginning of backward
    ended: tuple[float, ...]


def simulate(compute: Compute, services: Sequence[Service], contention: float = 0.0) -> Step:
    """Forward, then backward and the worker in parallel until both are done, then the optimizer.

    The worker starts a bucket when the previous one is done and backward has completed it. While the worker computes
    (not while it waits for the network), backward runs at 1 - ``contention`` of its speed: 0 if each of the two has a
    core, 1 if they share one and the worker goes first.
    """
    now = done = 0.0  # the time, and the progress of backward, in its own seconds
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
