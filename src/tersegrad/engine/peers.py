"""Peers: an engine's way to the other workers, and what they are told when something fails."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from tersegrad.comm.torch import NetworkError, TorchComm
from tersegrad.core import Comm
from tersegrad.engine.failure_report import Doing, FailureReporter
from tersegrad.engine.options import Options


class Peers(ABC):
    """The other workers of one engine."""

    @abstractmethod
    def connect(self) -> Comm:
        """A Comm for this engine alone; ``NetworkError`` if not all workers came."""

    @abstractmethod
    def agree(self, mine: str) -> None:
        """All workers say what they are about to do; ``ValueError`` on every worker if one differs."""

    @abstractmethod
    def explain(self, error: BaseException) -> BaseException:
        """Tells the others of an error, and returns one that says whose fault it is."""

    @abstractmethod
    def watch(self, doing: Callable[[], Doing]) -> None:
        """Called first, with a function that says what this worker is at."""

    def turn(self) -> AbstractContextManager[None]:
        """What the worker's thread does is done inside."""
        return nullcontext()

    @abstractmethod
    def stop(self) -> None:
        """Called before the worker's thread ends."""

    @abstractmethod
    def close(self) -> None:
        """Called when nothing more will be sent."""


class Processes(Peers):
    """The ranks of a process group, reached through a gloo group for our use alone.

    Args:
        ranks: Who takes part.
        options: The group, if one was given, the timeout, and the emulated network.
    """

    def __init__(self, ranks: dist.ProcessGroup, options: Options):
        self._ranks = ranks
        self._options = options
        self._group: dist.ProcessGroup | None = None
        self._comm: TorchComm | None = None

    def watch(self, doing: Callable[[], Doing]) -> None:
        """Begins to look for alarms of other ranks."""
        self._reporter = FailureReporter(self._ranks, self._options.group, doing)
        self._reporter.start()

    def connect(self) -> Comm:
        """See Peers."""
        network, group = self._options.network, self._options.group
        self._group = group or _new_group(self._options.timeout)
        self._comm = TorchComm(self._group)
        return self._comm if network is None else network(self._comm)

    def agree(self, mine: str) -> None:
        """Who differs is named on every rank."""
        assert self._comm is not None
        said = self._comm.all_gather(torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8))
        texts = [bytes(text.tolist()).decode(errors="replace") for text in said]
        if len(set(texts)) > 1:
            lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
            raise ValueError(f"the workers do not agree:\n{lines}\nCall attach() with the same spec on every worker.")

    def explain(self, error: BaseException) -> BaseException:
        """See FailureReporter."""
        return self._reporter.explain(error)

    def stop(self) -> None:
        """No more alarms."""
        self._reporter.stop()

    def close(self) -> None:
        """Frees the group, if it was made here."""
        if self._options.group is None and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            # gloo's thread spins on sockets that another rank has closed, until nobody holds the group here either.
            self._group = None
            if self._comm is not None:
                self._comm.release()


def _new_group(timeout: float) -> dist.ProcessGroup:
    try:
        group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
    except RuntimeError as error:
        raise NetworkError(str(error)) from error
    return group
