"""Real gloo processes for tests: started once, kept for the whole session, killed and started anew after a failure."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from support import fork_server

TIMEOUT = 240.0  # seconds until a test gives up on its workers; far above what any of them needs


class WorkerError(AssertionError):
    """What went wrong in which process, with its traceback."""


class Pool:
    """Processes with an initialised gloo group. ``run(function, *args)`` calls a function on each."""

    def __init__(self, size: int):
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Results in rank order; raises WorkerError if any worker did."""
        outcomes = self.outcomes(partial(function, **options) if options else function, *args)
        for rank, (ok, value) in enumerate(outcomes):
            if not ok:
                raise WorkerError(f"rank {rank}:\n{value}")
        return [value for _, value in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """(worked, result or traceback) of every rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        outcomes = []
        deadline = time.monotonic() + TIMEOUT
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                outcomes.append((False, f"no answer within {TIMEOUT} s"))
                continue
            try:
                outcomes.append(pipe.recv())
            except EOFError:
                outcomes.append((False, "the process died"))
        if not all(ok for ok, _ in outcomes):
            self.stop()  # the workers are out of step
        return outcomes

    def _start(self) -> None:
        context = fork_server.context()
        handle, store = tempfile.mkstemp(prefix="tersegrad-gloo-")
        os.close(handle)
        os.unlink(store)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    fork_server.begin()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        _destroy_left_groups()
        try:
            outcome = (True, function(*args))
        except BaseException:
            outcome = (False, traceback.format_exc())
        pipe.send(outcome)


def _destroy_left_groups() -> None:
    """Groups of the case before, if it left any: where another rank closed its own, gloo's thread would spin.

    Not at the end of that case: a rank that is done early would close the sockets on which others still wait.
    """
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
