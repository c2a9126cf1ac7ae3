"""Measure the synchronisation overhead of a step: thread wake-ups and stragglers."""

import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from tersegrad.comm.numbers import all_gather_floats
from tersegrad.core import Comm, Layout
from tersegrad.plan.model import FEWEST, Loss

ROUNDS = 15
ENOUGH = 20.0  # seconds after which no further steps are timed
NBYTES = 8  # of a minimal message


def measure(
    model: nn.Module,
    loss: Loss,
    step: Callable[[], object] | None,
    buckets: Sequence[Layout],
    exchange: Callable[[torch.Tensor], object],
    comm: Comm,
) -> float:
    """Seconds of a step in which a thread all-reduces a minimal message per bucket, as soon as backward completes it.

    The result is the same on all workers: the median over some rounds of the slowest worker's time.
    """
    with _Pacer(model, buckets, exchange) as pacer:

        def round() -> None:
            model.zero_grad()
            loss().backward()
            pacer.join()
            if step is not None:
                step()

        times: list[float] = []
        while len(times) < ROUNDS and not (len(times) > FEWEST and sum(times) > ENOUGH):
            started = time.perf_counter()
            round()
            times.append(max(all_gather_floats([time.perf_counter() - started], comm))[0])
    return statistics.median(times[1:])


class _Pacer:
    """Hooks that detect when a bucket is complete, and a thread that sends a message for each, as ``attach`` does."""

    def __init__(self, model: nn.Module, buckets: Sequence[Layout], exchange: Callable[[torch.Tensor], object]):
        place = {name: i for i, bucket in enumerate(buckets) for name in bucket.names}
        self._sizes, self._exchange = [len(bucket.names) for bucket in buckets], exchange
        self._missing, self._next = list(self._sizes), 0
        self._full: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._done = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda _, i=place[name]: self._note(i))
            for name, p in model.named_parameters()
            if name in place
        ]
        self._thread = threading.Thread(target=self._loop, name="tersegrad pace", daemon=True)

    def __enter__(self) -> "_Pacer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._full.put(False)
        self._thread.join()

    def _note(self, bucket: int) -> None:
        self._missing[bucket] -= 1
        while self._next < len(self._missing) and self._missing[self._next] <= 0:  # in order, as in DDP
            self._next += 1
            self._full.put(True)

    def join(self) -> None:
        """Wait until every bucket was sent, including those with a parameter that got no gradient."""
        for _ in range(self._next, len(self._sizes)):
            self._full.put(True)
        for _ in self._sizes:
            self._done.acquire()
        self._missing, self._next = list(self._sizes), 0
        if self._failure is not None:
            raise self._failure

    def _loop(self) -> None:
        word = torch.zeros(NBYTES, dtype=torch.uint8)
        while self._full.get():
            try:
                self._exchange(word)
            except BaseException as error:
                self._failure = error
            self._done.release()
