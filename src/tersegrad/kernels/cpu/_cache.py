"""The on-disk cache of the kernels' machine code, a lock for compiling, and a count of compilations.

Numba's own cache depends on the file of a function only. Code that was inlined from another file would be stale after
a change there, so the folder is named after a hash of all sources that go into machine code.
"""

import contextlib
import hashlib
import importlib.util
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from numba.core import caching, config, event
from numba.misc.appdirs import AppDirs

__all__ = ["Compilations", "cache_folder", "compilations", "compile_lock"]

_HERE = Path(__file__).resolve().parent
_SOURCES = (_HERE, _HERE.parent / "ops")
_PREFIX = "tersegrad-"
_fcntl: Any = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None  # not on Windows


# --- the folder


@cache
def cache_folder() -> Path:
    """The folder in which machine code is cached: the first of these that can be written to.

    ``NUMBA_CACHE_DIR`` if it is set, ``__pycache__`` of this package, the user's cache folder, a temporary folder.
    """
    for root in _roots():
        folder = root / f"{_PREFIX}{_source_hash()}"
        is_new = not folder.exists()
        if _can_write(folder):
            if is_new:
                _delete_others(folder)
            return folder
    return Path(tempfile.mkdtemp(prefix=_PREFIX))  # for this process alone


def _roots() -> Iterator[Path]:
    if asked := getattr(config, "CACHE_DIR", ""):
        yield Path(asked) / caching._CacheLocator.get_suitable_cache_subpath(__file__)
    yield _HERE / "__pycache__"
    yield Path(AppDirs(appname="tersegrad", appauthor=False).user_cache_dir)
    if (private := _private_folder()) is not None:
        yield private


def _private_folder() -> Path | None:
    """A temporary folder that no other user can write to; None if there is none."""
    if not hasattr(os, "getuid"):
        return None
    path = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError:
        return None
    safe = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return path if safe else None


@cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted(folder.glob("*.py")):
            digest.update(f"{folder.name}/{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _delete_others(folder: Path) -> None:
    """Delete machine code of other versions of the sources. Folders stay: a running process may still write to one."""
    for other in folder.parent.glob(f"{_PREFIX}{'[0-9a-f]' * 16}"):
        for path in other.glob("*.nb[ci]") if other != folder else ():
            with contextlib.suppress(OSError):
                path.unlink()


class _Locator(caching._CacheLocator):
    """Tells Numba about the folder, for functions of this package only."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        self._py_file = py_file
        self._lineno = py_func.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return _source_hash()

    def get_disambiguator(self) -> str:
        return str(self._lineno)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_Locator | None":
        return cls(py_func, py_file) if Path(py_file).resolve().parent == _HERE else None


if Path(__file__).exists():  # not in a zip archive
    caching.CacheImpl._locator_classes.insert(0, _Locator)


# --- the lock

_thread_lock = threading.RLock()
_holds = 0  # how often this process has entered the lock


@contextlib.contextmanager
def compile_lock() -> Iterator[None]:
    """Let only one process compile at a time: the others wait, and then load what it has cached.

    The lock belongs to the cache folder. It is re-entrant, and is released if the process dies. On systems without such
    locks every process compiles.
    """
    global _holds
    with _thread_lock:
        file = _locked_file() if _holds == 0 else None
        _holds += 1
        try:
            yield
        finally:
            _holds -= 1
            if file is not None:
                _fcntl.flock(file, _fcntl.LOCK_UN)  # also for a child that was forked meanwhile
                os.close(file)


def _locked_file() -> int | None:
    if _fcntl is None:
        return None
    try:
        file = os.open(cache_folder() / "compile.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    try:
        _fcntl.flock(file, _fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        os.close(file)
        return None
    return file


# --- the count


class Compilations(NamedTuple):
    """Kernels compiled by this process, and the time it took; those loaded from the cache do not count."""

    functions: int
    seconds: float


class _Counter(event.Listener):
    """Counts functions of this package. A function compiles those it calls, so only the outermost one is timed."""

    def __init__(self) -> None:
        self.functions, self.seconds = 0, 0.0
        self._depth, self._began = 0, 0.0

    def on_start(self, event: Any) -> None:
        if _is_kernel(event):
            if self._depth == 0:
                self._began = time.perf_counter()
            self._depth += 1
            self.functions += 1  # at the start: Numba's ``is_failed`` is inverted

    def on_end(self, event: Any) -> None:
        if _is_kernel(event):
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.perf_counter() - self._began


def _is_kernel(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith("tersegrad.kernels.cpu.")


_counter = _Counter()
event.register("numba:compile", _counter)


def compilations() -> Compilations:
    """How many kernels this process has compiled so far, and how many seconds that took."""
    return Compilations(_counter.functions, _counter.seconds)
