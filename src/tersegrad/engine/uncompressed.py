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
from tersegrad.engine.roll_call import RollCall, StepsDifferError


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

    def __init__(self, comm: Metered, roll_call: RollCall | None, fail: Callable[[Exception, Done], None]):
        self._comm = comm
        self._roll_call = roll_call
        self._fail = fail
        self._timer = InFlightTimer()

    @property
    def busy(self) -> bool:
        """Whether any bucket is under way."""
        return self._timer.count > 0

    def start(self, gradient: Gradient, last: bool) -> None:
        """On the host's thread. If the roll is called, the last bucket is done when that is done, too."""
        self._timer.begin()
        if self._roll_call is not None:
            self._roll_call.see(gradient.names)
        future = self._comm.start_all_reduce(gradient.buffer.div_(self._comm.size)).future()
        assert future is not None, "gloo has one"
        calls = self._roll_call if last and self._roll_call is not None and self._roll_call.ends_step() else None
        if calls is not None:
            said = calls.start(gradient.step).future()
            assert said is not None, "gloo has one"
            future = torch.futures.collect_all([future, said])
        future.add_done_callback(lambda done: self._land(done, gradient, calls))

    def _land(self, future: "torch.futures.Future[Any]", gradient: Gradient, calls: RollCall | None) -> None:
        """On gloo's thread."""
        self._comm.add_wait(self._timer.end())
        try:
            future.value()
            if calls is not None:
                calls.finish(wait=False)
        except RuntimeError as error:
            self._fail(NetworkError(str(error)), gradient.done)
        except StepsDifferError as error:
            self._fail(error, gradient.done)
        else:
            gradient.done(None)
