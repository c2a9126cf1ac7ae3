"""New processes without the seconds that importing torch takes: a server imports it once, and forks."""

import gc
import multiprocessing
import os
import sys
import tempfile
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

# DDP imports torch._dynamo, which takes as long as torch itself.
MODULES = ["torch.distributed", "torch._dynamo", "tersegrad.kernels.cpu", "tersegrad"]


def context() -> ForkServerContext:
    """To start processes with; the server has no threads, so it may fork."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(MODULES)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
        forkserver.ensure_running()
    return found


def begin() -> None:
    """Called first in a new process: what was imported before it is not for its garbage collector."""
    gc.freeze()


def command_line(argv: list[str], folder: Path) -> CompletedProcess[str]:
    """``tersegrad argv...`` in a process of its own, in this folder."""
    with tempfile.TemporaryDirectory() as words:
        process = context().Process(target=_main, args=(argv, folder, Path(words)))
        process.start()
        process.join(120)
        process.kill()  # if it is still there
        process.join()
        out, err = ((Path(words) / name).read_text() for name in ("out", "err"))
        return CompletedProcess(argv, process.exitcode, out, err)


def _main(argv: list[str], folder: Path, words: Path) -> None:
    from tersegrad.cli import main

    begin()
    os.chdir(folder)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(words / name, os.O_CREAT | os.O_WRONLY), stream.fileno())
    sys.exit(main(argv))
