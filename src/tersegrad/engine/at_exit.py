"""The end of the interpreter: threads that were not ended by ``close`` are ended here.

A thread that is inside torch while the interpreter goes away is ended in the middle of C++ code, and the process then
aborts, with everything done and an exit code of -6.
"""

import atexit
from typing import Protocol
from weakref import WeakSet


class _Threads(Protocol):
    def end_threads(self) -> None:
        """Called when the interpreter ends."""


_running: "WeakSet[_Threads]" = WeakSet()


def add(engine: _Threads) -> None:
    """``engine.end_threads()`` is called at the end, unless nobody holds the engine any more."""
    if not _running:
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # last registered, so it is called before what was there first
    _running.add(engine)


def discard(engine: _Threads) -> None:
    """It has no threads any more."""
    _running.discard(engine)


def _end_all() -> None:
    for engine in list(_running):
        engine.end_threads()
