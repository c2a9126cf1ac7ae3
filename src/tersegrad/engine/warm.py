"""Compiling: every kernel that any phase of a spec can reach is compiled here, and not in a training step."""

import logging
import time

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.comm import threads
from tersegrad.compressors import _indices
from tersegrad.compressors._sparse import Selective
from tersegrad.core import Comm, Layout, Reducer, Step, needs_of, phases
from tersegrad.core import state as states
from tersegrad.reducers.vgc import VGC

SHORT = Layout(("weight", "bias", "filter"), ((64, 64), (64,), (16, 16, 3, 3)))
LONG = Layout(("weight", "bias", "filter"), ((2048, 1024), (64,), (16, 16, 3, 3)))  # other kernels are at work there
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
        layouts = (SHORT, LONG) if numel >= LONG.numel // 2 else (SHORT,)
        for layout in layouts:
            _run_host(spec, layout)
            for phase in phases(spec):
                _run_once(phase, layout)
    seconds, count = time.perf_counter() - started, cpu.compilations().functions - before.functions
    if count and seconds > QUIET:
        _log.info("compiled %d kernels for %r in %.1f s; they are cached on this machine", count, spec, seconds)
    return seconds


def _run_host(spec: Reducer, layout: Layout) -> None:
    """What engine and hosts themselves call, and what depends on where the large elements lie."""
    needs = needs_of(spec)
    x = torch.ones(layout.numel)
    kernel = kernels.on(x)
    kernel.all_finite(x)
    kernel.xxh64(x.view(torch.uint8))
    if needs.lookahead:
        kernel.add_scaled(x, x, 0.5, torch.empty_like(x))
    if any(isinstance(part, Selective | VGC) for part in spec.walk()):
        for every in (2, 32):
            _indices.decode(*_encoded_indices(64 * every, every))
    if needs.squares is not None:
        kernel.add_squares(torch.zeros(4), torch.ones(8))
        kernel.add_token_squares(torch.zeros(4), torch.zeros(2, dtype=torch.int64), torch.ones(4), 2, -1)


def _encoded_indices(universe: int, every: int) -> tuple[int, Tensor, int, int, Tensor]:
    """Arguments to decode one index of every so many, which is a bitmap or gaps."""
    chosen = (torch.arange(universe // every, dtype=torch.int32) * every) + torch.arange(universe // every) % every
    chosen = chosen.to(torch.int32)
    body = torch.empty(_indices.max_nbytes(chosen.numel(), universe), dtype=torch.uint8)
    form, nbytes = _indices.encode(chosen, universe, body)
    return form, body[:nbytes], chosen.numel(), universe, torch.empty_like(chosen)


def _gradient(numel: int, number: int) -> Tensor:
    """In turn one with neighbours of like size and one with none: index codecs have several forms."""
    if number % 2:
        return torch.linspace(-1.0, 1.0 + number, numel).pow_(3)
    return ((torch.arange(numel) * 2654435761 % 2**32).float() / 2**31 - 1.0).pow_(3)


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
            x = _gradient(layout.numel, number + comm.rank)
            step = Step(layout, number, lr=1.0, squares=x.square())
            spec.start(step, x, x, state, comm)()
            states.commit(state)

    threads.run(2, work)
