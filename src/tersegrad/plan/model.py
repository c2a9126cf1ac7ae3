"""The user's model: its buckets as DDP makes them, and when backward completes each of them."""

import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tersegrad.comm.numbers import all_gather_floats
from tersegrad.core import Comm, Layout
from tersegrad.plan.timeline import Compute

FIRST_CAP, CAP = 1024 * 1024, 25 * 1024 * 1024  # bytes, as DDP's defaults
FORWARD = 1 / 3  # of a step's computation, if only its total is known: backward does twice the work
WARMUP, ROUNDS, FEWEST = 3, 11, 3  # warm-up steps, timed steps, and the fewest timed steps
ENOUGH = 20.0  # seconds after which no further steps are timed

Loss = Callable[[], Tensor]


def import_factory(text: str) -> Callable[..., Any]:
    """The function of ``module:factory``; modules are looked for in the current folder too."""
    module, colon, name = text.partition(":")
    if not colon or not name:
        raise ValueError(f"--model {text}: write module:factory, e.g. train:make_model.")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as python -m does
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model {text}: {error}.") from error
    return factory


def load(text: str) -> tuple[nn.Module, Loss | None]:
    """The model of ``module:factory``. The factory returns a module, or a module and a function that returns a loss."""
    made = import_factory(text)()
    model, loss = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {text} gave a {type(model).__name__}, not a torch.nn.Module.")
    return model, loss


def assign_buckets(
    named: Sequence[tuple[str, tuple[int, ...]]], first: int = FIRST_CAP, cap: int = CAP
) -> list[Layout]:
    """Buckets of float32 tensors in the order in which they become ready: one is closed when it reaches its limit.

    >>> [b.names for b in assign_buckets([("c", (9,)), ("b", (9,)), ("a", (9,))], first=4, cap=72)]
    [('c',), ('b', 'a')]
    """
    buckets: list[Layout] = []
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    nbytes = 0
    for place, (name, shape) in enumerate(named, start=1):
        names.append(name)
        shapes.append(shape)
        nbytes += 4 * math.prod(shape)
        if nbytes >= (cap if buckets else first) or place == len(named):
            buckets.append(Layout(tuple(names), tuple(shapes)))
            names, shapes, nbytes = [], [], 0
    return buckets


def buckets_of(model: nn.Module) -> list[Layout]:
    """The buckets of DDP, if gradients become ready in the reverse order of the parameters."""
    trained = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
    return assign_buckets(trained[::-1])


def buckets_of_size(numel: int, width: int = 1024) -> list[Layout]:
    """Buckets of a model of which only the number of parameters is known: matrices, and a remainder."""
    rows, rest = divmod(numel, width)
    matrices = [(f"matrix {row // width}", (min(width, rows - row), width)) for row in range(0, rows, width)]
    return assign_buckets([*matrices, *([("rest", (rest,))] if rest else [])])


def compute_of(seconds: float, buckets: Sequence[Layout]) -> Compute:
    """A step of ``seconds``, in which backward completes the buckets in proportion to their length."""
    backward = (1 - FORWARD) * seconds
    total, ready, so_far = sum(b.numel for b in buckets), [], 0
    for bucket in buckets:
        so_far += bucket.numel
        ready.append(backward * so_far / total)
    return Compute(FORWARD * seconds, backward, 0.0, tuple(ready))


def measure(
    model: nn.Module, loss: Loss, step: Callable[[], object] | None = None, comm: Comm | None = None
) -> tuple[Compute, list[Layout]]:
    """Time forward, backward and ``step`` (the optimizer), and when each bucket is complete; medians of a few rounds.

    Buckets follow the order in which gradients become ready, as in DDP after its first step. With a ``comm`` all
    workers run each round at the same time, and the times of the slowest worker count: the others would wait for it.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    arrived: dict[str, float] = {}
    hooks = [p.register_post_accumulate_grad_hook(_noter(arrived, name)) for name, p in parameters.items()]
    rounds: list[tuple[list[float], dict[str, float]]] = []
    try:
        while len(rounds) < WARMUP + ROUNDS:
            times, when = _round(model, loss, step, arrived)
            rounds.append((times if comm is None else _slowest(times, comm), when))
            if len(rounds) >= WARMUP + FEWEST and sum(sum(times) for times, _ in rounds) > ENOUGH:
                break
    finally:
        for hook in hooks:
            hook.remove()
    rounds = rounds[WARMUP:]
    forward, backward, optimizer = (statistics.median(times[i] for times, _ in rounds) for i in range(3))
    ready = {name: statistics.median(when.get(name, 1.0) for _, when in rounds) for name in parameters}
    order = sorted(ready, key=lambda name: ready[name])
    buckets = assign_buckets([(name, tuple(parameters[name].shape)) for name in order])
    filled = tuple(backward * max(ready[name] for name in b.names) for b in buckets)
    return Compute(forward, backward, optimizer, filled), buckets


def _slowest(times: list[float], comm: Comm) -> list[float]:
    """The times of the slowest worker; the same result on all workers."""
    return max(all_gather_floats(times, comm), key=sum)


def _noter(arrived: dict[str, float], name: str) -> Callable[[Tensor], None]:
    def note(parameter: Tensor) -> None:
        arrived[name] = time.perf_counter()

    return note


def _round(
    model: nn.Module, loss: Loss, step: Callable[[], object] | None, arrived: dict[str, float]
) -> tuple[list[float], dict[str, float]]:
    """Seconds of forward, backward and optimizer, and the time in backward at which each gradient was ready."""
    model.zero_grad()
    arrived.clear()
    started = time.perf_counter()
    value = loss()
    forward = time.perf_counter()
    value.backward()
    backward = time.perf_counter()
    if step is not None:
        step()
    ended = time.perf_counter()
    when = {name: (moment - forward) / (backward - forward) for name, moment in arrived.items()}
    return [forward - started, backward - forward, ended - backward], when


def gradients_for(buckets: Sequence[Layout], model: nn.Module | None, seed: int = 0) -> list[Tensor]:
    """Gradients to time codecs with: the model's own if it has them, else Laplace noise of the same length."""
    known = {} if model is None else {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    noise = torch.Generator().manual_seed(seed)
    made = []
    for bucket in buckets:
        if all(name in known for name in bucket.names):
            made.append(torch.cat([known[name].detach().float().reshape(-1) for name in bucket.names]))
        else:
            uniform = torch.rand(bucket.numel, generator=noise).sub_(0.5)
            made.append(uniform.sign() * -torch.log1p(-1.999 * uniform.abs()))
    return made
