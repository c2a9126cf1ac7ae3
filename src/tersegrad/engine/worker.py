"""The thread beside training that does what must happen in one order on all ranks."""

import queue
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 2.0  # seconds that a thread is waited for at the end of the process


class Worker:
    """One thread that does jobs in the order in which they came. After a failed bucket it refuses all others.

    ``explain`` makes of an error one that says whose fault it is. Jobs are done inside ``turn()``.
    """

    def __init__(
        self,
        explain: Callable[[BaseException], BaseException],
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._explain = explain
        self._turn = turn
        self.busy = False  # whether it is at something that other ranks do too
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Callable[[BaseException | None], None]] | None]
        self._jobs = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="tersegrad", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether it refuses everything."""
        return self._failure is not None

    def submit(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Queues work that all other ranks do too: once it has failed, the ranks are out of step."""
        self._jobs.put((lambda: self._with_others(work), done))

    def _with_others(self, work: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        self.busy = True
        try:
            work()
        except BaseException as error:
            # Messages under way are held by frames of the traceback; they would keep gloo's sockets open after close(),
            # and its thread spins on a socket that the other end has closed.
            _clear_frames(error)
            self._failure = self._explain(error)
            raise self._failure from error
        finally:
            self.busy = False

    def call(self, work: Callable[[], T], together: bool = False) -> T:
        """Does something between two buckets, and waits for the result; ``together``: all other ranks do it too."""
        if not self._thread.is_alive():
            return work()  # closed: nothing else can be running
        results: list[T] = []
        errors: list[BaseException | None] = []
        finished = threading.Event()

        def done(error: BaseException | None) -> None:
            errors.append(error)
            finished.set()

        def job() -> None:
            results.append(work())

        self._jobs.put(((lambda: self._with_others(job)) if together else job, done))
        finished.wait()
        if errors[0] is not None:
            raise errors[0]
        return results[0]

    def stop(self) -> bool:
        """Ends the thread after what is queued; False if it had ended before."""
        if not self._thread.is_alive():
            return False
        self._jobs.put(None)
        self._thread.join()
        return True

    def end(self, abort: Callable[[], None]) -> None:
        """Ends the thread soon, for the end of the process: what it waits for is aborted if it does not come."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                abort()
                self._thread.join(PATIENCE)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            try:
                with self._turn():
                    work()
            except BaseException as error:
                done(error)
            else:
                done(None)


def _clear_frames(error: BaseException | None) -> None:
    """Of an error, and of those that it came from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]
