"""Steps in which every bucket is only averaged: all-reduced at once, without the worker, exactly as DDP does it.

Buckets are started on the host's thread and completed on gloo's. Waking a second thread for each bucket costs several
per cent of a step on busy cores.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tersegrad.comm.metered import Metered
from tersegrad.comm.torch import NetworkError
from tersegrad.engine.gradient import Done, Gradient


class InFlightTimer:
    """How long anything was in flight. Any thread may start and end something."""

    def __init__(self) -> None:
        self.count = 0
        self._since = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """One more is in flight."""
        with self._lock:
            if self.count == 0:
                self._since = time.perf_counter()
            self.count += 1

    def end(self) -> float:
        """One has landed; returns the seconds since the first of them took off if it was the last, else 0."""
        with self._lock:
            self.count -= 1
            return time.perf_counter() - self._since if self.count == 0 else 0.0


class Uncompressed:
    """All-reduces buckets as they are."""

    def __init__(self, comm: Metered, fail: Callable[[NetworkError, Done], None]):
        self._comm = comm
        self._fail = fail
        self._timer = InFlightTimer()

    @property
    def busy(self) -> bool:
        """Whether any bucket is under way."""
        return self._timer.count > 0

    def start(self, gradient: Gradient) -> None:
        """On the host's thread."""
        self._timer.begin()
        pending = self._comm.start_all_reduce(gradient.buffer.div_(self._comm.size))
        future = pending.future()
        if future is None:
            pending.wait()
            self._comm.add_wait(self._timer.end())
            gradient.done(None)
        else:
            future.add_done_callback(lambda done: self._land(done, gradient))

    def _land(self, future: "torch.futures.Future[Any]", gradient: Gradient) -> None:
        """On gloo's thread."""
        self._comm.add_wait(self._timer.end())
        try:
            future.value()
        except RuntimeError as error:
            self._fail(NetworkError(str(error)), gradient.done)
        else:
            gradient.done(None)
