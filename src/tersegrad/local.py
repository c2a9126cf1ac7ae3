"""LocalComm: N workers as threads of one process, so that anything can be tried and tested without a network."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from tersegrad.core import Comm

T = TypeVar("T")


class _Hub:
    """Where the workers of one LocalComm meet."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size


class LocalComm(Comm):
    """A Comm between threads. Sums are made in rank order, so results are the same in every run."""

    def __init__(self, hub: _Hub, rank: int):
        self._hub = hub
        self.rank = rank
        self.size = len(hub.slots)

    def all_reduce(self, x: Tensor) -> None:
        """Sum in rank order."""
        parts = self._swap(x.clone())
        x.copy_(parts[0])
        for part in parts[1:]:
            x.add_(part)

    def all_gather(self, x: Tensor, sizes: list[int] | None = None) -> list[Tensor]:
        """Copies of every worker's bytes."""
        gathered = self._swap(x.clone())
        if sizes is not None and (came := [g.numel() for g in gathered]) != sizes:
            raise ValueError(f"all_gather was told the sizes {sizes}, and {came} came.")
        return gathered

    def shift(self, x: Tensor) -> Tensor:
        """The previous worker's bytes."""
        previous: Tensor = self._swap(x.clone())[(self.rank - 1) % self.size]
        return previous

    def exchange(self, parts: list[Tensor]) -> list[Tensor]:
        """What every worker has for this one."""
        return [theirs[self.rank] for theirs in self._swap([part.clone() for part in parts])]

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """The root's tensor."""
        x.copy_(self._swap(x.clone())[root])

    def _swap(self, mine: Any) -> list[Any]:
        """Everybody's object, in rank order."""
        self._hub.slots[self.rank] = mine
        self._hub.barrier.wait()
        everybody = list(self._hub.slots)
        self._hub.barrier.wait()  # nobody writes the next object before all have read this one
        return everybody


def run(size: int, work: Callable[[LocalComm], T]) -> list[T]:
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
            results[rank] = work(LocalComm(hub, rank))
        except threading.BrokenBarrierError:
            pass  # another worker failed and released us; its error is the one to show
        except BaseException as error:
            errors.append((rank, error))
            hub.barrier.abort()

    threads = [threading.Thread(target=worker, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda pair: pair[0])[1]
    return results
