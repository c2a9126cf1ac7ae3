"""Peers: an engine's way to the other workers, and what they are told when something fails."""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from hmac import compare_digest
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tersegrad.comm.torch import NetworkError, TorchComm
from tersegrad.core import Comm
from tersegrad.core.signer import VARIABLE, proof, run_key, shared_key
from tersegrad.engine.failure_report import Doing, FailureReporter
from tersegrad.engine.options import Options


class Peers(ABC):
    """The other workers of one engine."""

    may_differ: ClassVar[bool] = True  # whether they may have been told, or come to do, something else

    @abstractmethod
    def connect(self) -> Comm:
        """A Comm for this engine alone; ``NetworkError`` if not all workers came."""

    @abstractmethod
    def agree(self, mine: dict[str, object]) -> str:
        """All workers say what they are about to do, and get a name for this run.

        Raises:
            ValueError: One differs; on every worker, with what each said.
        """

    @abstractmethod
    def compare_loaded(self, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """All workers say which state they have been given; what each said, by rank."""

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
    def abort(self) -> None:
        """Ends whatever the worker's thread waits for, with an error; at the end of the process only."""

    @abstractmethod
    def stop(self) -> None:
        """Called before the worker's thread ends."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Called when nothing more will be sent; ``failed``: others may be waiting for this worker."""


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
        self._run = ""

    def watch(self, doing: Callable[[], Doing]) -> None:
        """Begins to look for alarms of other ranks."""
        self._reporter = FailureReporter(self._ranks, self._options.group, doing)
        self._reporter.start()

    def connect(self) -> Comm:
        """See Peers."""
        network, group = self._options.network, self._options.group
        timeout = timedelta(seconds=self._options.timeout)
        self._group = group or _new_group(timeout)
        self._comm = TorchComm(self._group, None if group is None else timeout)
        return self._comm if network is None else network(self._comm)

    def agree(self, mine: dict[str, object]) -> str:
        """Who differs is named on every rank. The run's name is drawn by the first."""
        assert self._comm is not None
        facts = {name: str(value) for name, value in mine.items()}
        facts[VARIABLE] = "given" if shared_key() else "none"
        said = self._comm.all_gather(_bytes_of(json.dumps([facts, secrets.token_hex(8)])))
        heard = [json.loads(bytes(text.tolist())) for text in said]
        ranks = {self._comm.name(rank): theirs for rank, (theirs, _) in enumerate(heard)}
        if any(theirs != facts for theirs in ranks.values()):
            raise ValueError(_disagreement(ranks))
        tokens = [token for _, token in heard]
        if key := shared_key():
            self._prove(key, tokens)
            self._comm.share(run_key(key, tokens))
        self._run = str(tokens[0])
        return self._run

    def _prove(self, key: bytes, tokens: list[str]) -> None:
        """Every rank shows that it has the key."""
        assert self._comm is not None
        said = self._comm.all_gather(_bytes_of(proof(key, tokens, self._comm.rank)))
        shown = [bytes(text.tolist()).decode(errors="replace") for text in said]
        wrong = [r for r, text in enumerate(shown) if not compare_digest(text, proof(key, tokens, r))]
        if wrong:
            names = ", ".join(str(self._comm.name(rank)) for rank in wrong)
            raise ValueError(f"rank {names} has another {VARIABLE} than this rank, {self._comm.name(self._comm.rank)}.")

    def compare_loaded(self, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Through the store: a rank that loads nothing is in a step of its own, and must not be mixed up with this."""
        return self._reporter.compare(mine, self._run, self._options.timeout)

    def explain(self, error: BaseException) -> BaseException:
        """See FailureReporter."""
        return self._reporter.explain(error)

    def stop(self) -> None:
        """No more alarms."""
        self._reporter.stop()

    def abort(self) -> None:
        """See Peers."""
        if self._comm is not None:
            self._comm.abort()

    def close(self, failed: bool) -> None:
        """Frees the group, if it was made here. Who waits for a rank that has failed is told at once."""
        if failed and self._comm is not None and self._comm.size > 1:
            self._comm.abort()
        if self._options.group is None and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            # gloo's thread spins on sockets that another rank has closed, until nobody holds the group here either.
            self._group = None
            if self._comm is not None:
                self._comm.release()


def _bytes_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _disagreement(ranks: dict[int, dict[str, str]]) -> str:
    """All that ranks were told, and in what they differ."""
    lines = [f"  rank {rank}: {_line(facts)}" for rank, facts in ranks.items()]
    first, (_, usual) = next(iter(ranks)), next(iter(ranks.items()))
    differ = []
    for name in dict.fromkeys(name for facts in ranks.values() for name in facts):
        other = next((rank for rank, facts in ranks.items() if facts.get(name) != usual.get(name)), None)
        if other is not None:
            differ.append(f"{name} ({usual.get(name)} on rank {first}, {ranks[other].get(name)} on rank {other})")
    return (
        "the workers do not agree:\n" + "\n".join(lines) + f"\nThey differ in {', '.join(differ)}. "
        "Call attach() with the same spec and the same arguments on every worker."
    )


def _line(facts: dict[str, str]) -> str:
    rest = {name: value for name, value in facts.items() if name not in ("tersegrad", "spec", "parameters")}
    told = ", ".join(f"{name}={value}" for name, value in rest.items())
    start = f"tersegrad {facts.get('tersegrad')}, {facts.get('spec')}, {facts.get('parameters')} parameters"
    return f"{start}, {told}"


def _new_group(timeout: timedelta) -> dist.ProcessGroup:
    try:
        group: dist.ProcessGroup = dist.new_group(timeout=timeout, backend="gloo")
    except RuntimeError as error:
        raise NetworkError(str(error)) from error
    return group
