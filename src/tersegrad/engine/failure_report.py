"""Failure attribution: which rank was lost, told on every rank that is still there.

gloo says "connection closed by peer" or "timed out", and not by whom. So each failing rank writes its error to the
store of the rendezvous, and sets an alarm there. A thread of every rank looks for the alarm whenever its worker has
made no progress for a moment, and answers with what the worker is doing. A rank that wrote an error of its own is to
blame; one that is silent is dead, stopped, or out of reach; one that has not come to the step that others wait in
hangs. A rank that fails stays until the others have read its error: it may be the one that holds the store.
"""

import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # as torch.distributed, which does not export it to type checkers

from tersegrad.comm.torch import NetworkError

GRACE = 5.0  # seconds in which the others are awaited: they notice a loss not all at once
_TICK = 0.25  # seconds without progress after which a worker looks for the alarm
_PAUSE = 0.02
_TEXT = 2000  # of an error's text, as much as others need to see

_made: Counter[str] = Counter()  # how many there were of each name

Doing = tuple[bool, int]  # whether the worker is in an exchange, and the step that it is in or waits for


class AloneError(ValueError):
    """This rank was given a state to load, and another was not."""


class FailureReporter:
    """Writes and reads how the ranks of one group failed. ``start`` it before ``explain`` is called."""

    def __init__(
        self,
        ranks: dist.ProcessGroup,  # who takes part
        group: dist.ProcessGroup | None,  # the group that they exchange in; None if it is still to be made
        doing: Callable[[], Doing],
        grace: float = GRACE,
    ):
        self.rank, self.size, self.grace = dist.get_rank(ranks), dist.get_world_size(ranks), grace
        self._names = dist.get_process_group_ranks(ranks)  # as people know them: ranks among all processes
        self._doing = doing
        self._loads = 0
        name = "all" if group is None else group.group_name
        _made[name] += 1  # as on all others
        self._store = PrefixStore(f"tersegrad/{name}/{_made[name]}", dist.distributed_c10d._get_default_store())
        self._errors: dict[int, str] = {}  # the others', as far as they have been read
        self._answers: dict[int, str] = {}  # "busy" or "idle", and the step
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Only this thread talks to the store: a store whose holder is stopped never answers.
        self._thread = threading.Thread(target=self._loop, name="tersegrad failures", daemon=True)

    def start(self) -> None:
        """Begins to look for alarms."""
        if self.size > 1:
            self._thread.start()

    # ---- on the worker's thread ------------------------------------------------------------------

    def explain(self, error: BaseException) -> BaseException:
        """Writes the error to the store. An error of the network is given the reason that the others tell."""
        if not self._thread.is_alive():  # a single rank, or the end of the process
            return error
        network = isinstance(error, NetworkError)
        step = self._doing()[1]
        text = f"{'lost' if network else 'failed'}: {type(error).__name__}: {error}"[:_TEXT]
        finished, reached = threading.Event(), []

        def ask() -> None:
            try:
                self._publish(text)
                self._await_others(until_blame=network)
                reached.append(True)
            except Exception:  # the store went with the process that holds it
                pass
            finished.set()

        self._jobs.put(ask)
        finished.wait(self.grace + 1.0)
        if not network:
            return error
        reason = self._reason(step, bool(reached))
        return NetworkError(f"{reason} This rank, {self._names[self.rank]}, saw in step {step}: {error}")

    def compare(self, mine: dict[str, Any], run: str, timeout: float) -> dict[int, dict[str, Any]]:
        """Writes to the store what this rank was given to load, and waits for what the others were given.

        ``run`` is a name that no other run has: a store may outlive one.

        Raises:
            AloneError: Some rank was given nothing in this time.
        """
        self._loads += 1
        if not self._thread.is_alive():
            return {self._names[self.rank]: mine}
        heard: dict[int, str] = {}
        finished, this, over = threading.Event(), self._loads, time.monotonic() + timeout

        def ask() -> None:
            try:
                self._store.set(f"load {run} {this} {self.rank}", json.dumps(mine))
                while len(heard) < self.size and time.monotonic() < over:
                    heard.update(self._found(f"load {run} {this}", heard))
                    time.sleep(0.0 if len(heard) == self.size else _PAUSE)
            except Exception:  # the store is gone; who is missing is said below
                pass
            finished.set()

        self._jobs.put(ask)
        finished.wait(timeout + self.grace)
        if len(heard) < self.size:
            raise AloneError(self._alone(mine, [rank for rank in range(self.size) if rank not in heard]))
        return {self._names[rank]: json.loads(text) for rank, text in sorted(heard.items())}

    def _alone(self, mine: dict[str, Any], missing: list[int]) -> str:
        given = f"a state of step {mine['step']}" if "step" in mine else "a state that does not fit"
        return (
            f"rank {self._names[self.rank]} was given {given} to load, and {self._called(missing)} not given any. "
            "All ranks load together what they have saved after the same step."
        )

    def _called(self, ranks: list[int]) -> str:
        names = ", ".join(str(self._names[rank]) for rank in ranks)
        return f"rank {names} was" if len(ranks) == 1 else f"ranks {names} were"

    def stop(self) -> None:
        """Ends the thread, unless the store holds it."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(1.0)

    def _reason(self, step: int, reached: bool) -> str:
        failed = [rank for rank, error in self._errors.items() if error.startswith("failed")]
        if failed:
            return " ".join(f"rank {self._names[rank]} {self._errors[rank]}" for rank in failed)
        if not reached:
            return (
                "the workers have lost each other, and the store of the rendezvous cannot be reached either: rank 0, "
                "which holds it (unless torchrun does), has ended, was killed, or is stopped."
            )
        heard = {*self._errors, *self._answers, self.rank}
        if silent := [rank for rank in range(self.size) if rank not in heard]:
            return (
                f"{self._who_does(silent)} not answer: ended, killed, stopped, closed or out of reach, or attach() was "
                "never called there."
            )
        if late := [rank for rank in range(self.size) if self._is_late(rank, step)]:
            return (
                f"{self._who_does(late)} answer, but did not come to step {step} in time: the script hangs there, or "
                "is slower than the timeout allows."
            )
        return (
            "all ranks answer, but lost contact: a link was down for longer than the timeout, or one was too slow; or "
            "the ranks do not do the same (backward, flush and check_replicas must be called by all alike)."
        )

    def _who_does(self, ranks: list[int]) -> str:
        names = ", ".join(str(self._names[rank]) for rank in ranks)
        return f"rank {names} does" if len(ranks) == 1 else f"ranks {names} do"

    def _is_late(self, rank: int, step: int) -> bool:
        """Whether a rank is out of all exchanges and not ahead of this one."""
        if rank in self._errors or rank not in self._answers:
            return False
        state, at = self._answers[rank].split()
        return state == "idle" and int(at) <= step

    # ---- on the reporter's own thread ---------------------------------------------------------------

    def _loop(self) -> None:
        before, answered, gone = None, False, False
        while True:
            try:
                job = self._jobs.get(timeout=_TICK)
            except queue.Empty:
                now = self._doing()
                if now == before and not gone:
                    try:
                        answered = self._answer(now, answered)
                    except Exception:  # the store is gone: nothing more to learn
                        gone = True
                before = now
                continue
            if job is None:
                return
            job()

    def _answer(self, now: Doing, answered: bool) -> bool:
        """If there is an alarm, says what this worker is doing, once, and reads the errors."""
        if not answered and not self._store.check(["alarm"]):
            return False
        if not answered:
            self._store.set(f"answer {self.rank}", f"{'busy' if now[0] else 'idle'} {now[1]}")
        self._read()
        return True

    def _publish(self, text: str) -> None:
        self._store.set(f"error {self.rank}", text)
        self._store.set("alarm", "")

    def _await_others(self, until_blame: bool) -> None:
        """Reads until all others have been heard of, or the time is over, or somebody is known to have failed."""
        deadline = time.monotonic() + self.grace
        while time.monotonic() < deadline:
            self._read()
            if until_blame and any(error.startswith("failed") for error in self._errors.values()):
                return
            if len({*self._errors, *self._answers}) == self.size - 1:
                return
            time.sleep(_PAUSE)

    def _read(self) -> None:
        for kind, heard in (("error", self._errors), ("answer", self._answers)):
            heard.update(self._found(kind, {*heard, self.rank}))

    def _found(self, kind: str, known: Container[int]) -> dict[int, str]:
        """What other ranks have written under a key, as far as it is not known."""
        unknown = [rank for rank in range(self.size) if rank not in known]
        there = [rank for rank in unknown if self._store.check([f"{kind} {rank}"])]
        return {rank: self._store.get(f"{kind} {rank}").decode(errors="replace") for rank in there}
