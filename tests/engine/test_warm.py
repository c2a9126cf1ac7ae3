"""Compiling is paid at attach: whatever phase training comes to, its steps compile nothing and load nothing."""

import os
import pkgutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from numba.core.dispatcher import Dispatcher

from tersegrad import kernels, parse
from tersegrad.auto import Auto
from tersegrad.comm import threads
from tersegrad.core import Layout, Reducer, State, Step, Wrapper
from tersegrad.core import state as states
from tersegrad.engine import warm
from tersegrad.kernels import cpu
from tersegrad.reducers import GradiVeQ
from tersegrad.specs import PRESETS
from tersegrad.wrappers import Schedule

LAYOUT = Layout(("conv", "matrix", "bias"), ((64, 64, 3, 3), (2048, 1006), (64,)))
assert LAYOUT.numel >= 1 << 21


def dispatchers() -> list[Dispatcher]:
    modules = [import_module(f"{cpu.__name__}.{m.name}") for m in pkgutil.iter_modules(cpu.__path__)]
    found = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, Dispatcher)}
    return list(found.values())


def forget() -> None:
    """As in a new process: nothing is compiled, nothing is loaded."""
    for dispatcher in dispatchers():
        dispatcher._reset_overloads()
    warm._done.clear()


def loaded() -> int:
    return sum(len(dispatcher.overloads) for dispatcher in dispatchers())


def in_its_phases(spec: Reducer) -> list[Reducer]:
    """The spec, and one like it that comes to its later phases within a few steps."""
    if isinstance(spec, GradiVeQ):
        return [spec, replace(spec, warmup=1, learn=4, compress=4)]
    return [spec]


def skip_beginning(spec: Reducer, state: State) -> None:
    """Puts schedules behind their last step."""
    while isinstance(spec, Wrapper) and not isinstance(spec, Auto):
        if isinstance(spec, Schedule):
            state["position"] = 10**6
        spec, state = spec.inner, state["inner"]


def train(spec: Reducer, steps: int, late: bool) -> None:
    def work(comm):
        state = spec.init(LAYOUT, comm)
        if late:
            skip_beginning(spec, state)
        generator = torch.Generator().manual_seed(comm.rank)
        for number in range(steps):
            x = torch.randn(LAYOUT.numel, generator=generator)
            mean_finite = spec.start(Step(LAYOUT, number, 0.1, x.square()), x, x, state, comm)()
            assert mean_finite is not False
            kernels.on(x).all_finite(x)
            states.commit(state)

    threads.run(2, work)


@pytest.mark.parametrize("names", [list(PRESETS)[i::3] for i in range(3)], ids=["first", "second", "third"])
def test_steps_after_warming_load_and_compile_nothing(names):
    for name in names:
        spec = parse(name)
        forget()
        warm.warm(spec, LAYOUT.numel)
        before, compiled = loaded(), cpu.compilations().functions
        for variant in in_its_phases(spec):
            steps = 30 if isinstance(spec, Auto) else 12 if isinstance(spec, GradiVeQ) else 2
            train(variant, steps, late=False)
        train(spec, 2, late=True)
        assert (loaded(), cpu.compilations().functions) == (before, compiled), f"{name} compiles in training"


def test_the_count_sees_a_kernel_that_was_not_warmed():
    forget()
    warm.warm(parse("none"), LAYOUT.numel)
    before = loaded()
    train(parse("topk"), 1, late=False)
    assert loaded() > before


SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from tersegrad import parse
from tersegrad.engine.warm import warm
from tersegrad.kernels import cpu
warm(parse("none"), 10)
print(cpu.compilations().functions)
"""


def test_a_second_process_loads_what_the_first_has_compiled_and_long_compiling_is_said(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert int(first.stdout) > 0
    assert int(second.stdout) == 0
    assert "compiled" in first.stderr or "they are cached" not in second.stderr
    assert "compiled" not in second.stderr
