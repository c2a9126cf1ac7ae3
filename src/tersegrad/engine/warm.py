"""Compiling: every kernel that any phase of a spec can reach is compiled here, and not in a training step."""

import logging
import time

import torch

from tersegrad.comm import threads
from tersegrad.core import Comm, Layout, Reducer, Step, phases
from tersegrad.core import state as states

SHORT = Layout(("weight", "bias", "filter"), ((64, 64), (64,), (8, 8, 3, 3)))
LONG = Layout(("weight", "bias", "filter"), ((2048, 1024), (64,), (8, 8, 3, 3)))  # other kernels are at work there
STEPS = 6  # enough for what learns from a few steps
QUIET = 1.0  # seconds that may pass without a line of log

_log = logging.getLogger("tersegrad")


def warm(spec: Reducer, numel: int) -> float:
    """Compiles, or loads from the cache, all that a spec can need for a model of ``numel`` parameters.

    One process of a machine compiles at a time: the others wait, and then load what it has compiled.

    Returns:
        The seconds that it took.
    """
    from tersegrad.kernels import cpu  # here, not above: importing Numba takes a while

    started, before = time.perf_counter(), cpu.compilations()
    with cpu.compile_lock():
        for phase in phases(spec):
            for layout in (SHORT, LONG) if numel >= LONG.numel // 2 else (SHORT,):
                _run_once(phase, layout)
    seconds, count = time.perf_counter() - started, cpu.compilations().functions - before.functions
    if count and seconds > QUIET:
        _log.info("compiled %d kernels for %r in %.1f s; they are cached on this machine", count, spec, seconds)
    return seconds


_done: set[tuple[int, int]] = set()  # fingerprints of phases that have run in this process, and layouts


def _run_once(spec: Reducer, layout: Layout) -> None:
    key = spec.fingerprint(), layout.numel
    if key not in _done:
        _run(spec, layout)
        _done.add(key)


def _run(spec: Reducer, layout: Layout) -> None:
    """A few steps of two workers on made-up gradients; they use no random numbers and leave no trace."""
    steps = STEPS if layout is SHORT else 2

    def work(comm: Comm) -> None:
        state = spec.init(layout, comm)
        for number in range(steps):
            x = torch.linspace(-1.0, 1.0 + number, layout.numel).pow_(3)
            step = Step(layout, number, lr=1.0, squares=x.square())
            spec.start(step, x, x, state, comm)()
            states.commit(state)

    threads.run(2, work)
