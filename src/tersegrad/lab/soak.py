"""Long random runs of methods, sizes, restarts and NaNs; replicas, conservation and memory are checked.

    python -m tersegrad.lab.soak --steps 10000 --seed 0

Most steps run on workers that are threads (ThreadComm); every tenth episode runs in real gloo processes through
``attach``. An episode is one method on one bucket (or model) for some dozen steps; every fifth has a bucket as large as
a real one, from 2**20 to 2**21 floats, and fewer steps. Methods come as they are, and inside warm-ups, schedules and
StepAhead whose phases end within the episode; the learning rate drops. States are saved and loaded into fresh reducers
over other buckets of the same tensors, and in real processes by another number of ranks; single elements become NaN or
infinite; in some steps a tensor has no gradient on one worker, or on all. Checked:

- replicas: the same bits on all workers in every step;
- NaN: a step with a NaN on one worker is non-finite on all, and leaves the state unchanged;
- conservation: sum of means + mean residual == sum of what the gradients contribute (``contribution``), to rounding
  and what the method states that it ``loses``; steps with a NaN are left out;
- memory: after a third of the run as warm-up, neither the resident set nor what Python has allocated may grow by more
  than GROWTH (medians of the last and the first quarter of the samples after warm-up).
"""

import argparse
import ctypes
import gc
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tersegrad.comm import threads
from tersegrad.core import (
    Comm,
    Compressor,
    Layout,
    Reducer,
    State,
    Step,
    contribution,
    needs_of,
)
from tersegrad.core import state as states
from tersegrad.engine.idle import idle_tensors
from tersegrad.hosts.ddp import attach
from tersegrad.reducers import AllGather, Ring, TwoShot
from tersegrad.specs import PRESETS, parse, registry
from tersegrad.testing.inputs import squares
from tersegrad.testing.runs import finish, held, same
from tersegrad.wrappers import ErrorFeedback, Schedule, StepAhead, Warmup

GROWTH = 48 << 20  # bytes: ten buckets of the largest size; a leak of one per episode is ten times more
STEPS = 30  # of an episode
LARGE_STEPS = 10  # of one with a large bucket
IN_PROCESSES = 10  # every 10th episode runs in real processes
WITH_LARGE = 5  # every 5th episode has a large bucket
LARGE = 2**20  # floats that a large bucket has at least
TENSORS = ("a.weight", "a.bias", "b.weight", "c.weight", "d.bias")
NAN_STEP = 3  # of both parts of an episode in real processes
PHASE = 4  # steps after which warm-ups and schedules end


@dataclass
class Tally:
    """Counts and measurements of a run."""

    steps: int = 0
    process_steps: int = 0
    large_steps: int = 0
    episodes: int = 0
    restarts: int = 0
    nonfinite: int = 0
    worst: float = 0.0  # error of conservation, relative to what is allowed
    methods: Counter[str] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    resident: list[int] = field(default_factory=list)  # bytes after every episode
    traced: list[int] = field(default_factory=list)


def methods() -> list[Reducer]:
    """Every reducer's examples, every compressor in three reducers with and without memory, and the presets."""
    classes = [cls for cls in registry().values() if cls.__module__.startswith("tersegrad.")]
    examples = [parse(text) for cls in classes for text in cls.examples or (f"{cls.__name__}()",)]
    found = [spec for spec in examples if isinstance(spec, Reducer)]
    codecs = [spec for spec in examples if isinstance(spec, Compressor)]
    exchanges = [exchange(codec) for codec in codecs for exchange in (AllGather, Ring, TwoShot)]
    found += exchanges + [ErrorFeedback(exchange) for exchange in exchanges]
    found += [spec for spec in (parse(preset.spec) for preset in PRESETS.values()) if isinstance(spec, Reducer)]
    return list({repr(spec): spec for spec in found}.values())


def with_phases(reducer: Reducer, rng: np.random.Generator) -> Reducer:
    """The method as it is, or inside a warm-up, a schedule or StepAhead."""
    if any(isinstance(part, StepAhead) for part in reducer.walk()):
        return reducer  # nothing may be around it
    for kind in rng.permutation(["as it is", "warmup", "schedule", "ahead", "all"]):
        try:
            return _WRAPPED[str(kind)](reducer)
        except ValueError:  # it has no ratio, or no residual
            continue
    return reducer


def _scheduled(reducer: Reducer) -> Reducer:
    ratio = Schedule(reducer, "ratio", smoothness=1.0)._own_value()
    return Schedule(reducer, "ratio", steps={0: 1.0, PHASE: 0.5, 2 * PHASE: ratio})


_WRAPPED: dict[str, Callable[[Reducer], Reducer]] = {
    "as it is": lambda reducer: reducer,
    "warmup": lambda reducer: Warmup(reducer, steps=PHASE),
    "schedule": _scheduled,
    "ahead": StepAhead,
    "all": lambda reducer: StepAhead(Warmup(_scheduled(reducer), steps=PHASE)),
}


# ---- one episode on threads -----------------------------------------------------------------------


@dataclass
class Plan:
    """The events of one episode, the same on all workers."""

    reducer: Reducer
    size: int
    shapes: dict[str, tuple[int, ...]]
    steps: int
    seed: int
    restarts: dict[int, list[list[str]]]  # before which step, and which tensors are in which bucket from then on
    nonfinite: dict[int, int]  # in which step, and on which worker
    # In which step which tensor has no gradient, and on which worker; None: on all.
    idle: dict[int, tuple[str, int | None]] = field(default_factory=dict)

    @staticmethod
    def drawn(reducer: Reducer, rng: np.random.Generator, steps: int = STEPS, large: bool = False) -> "Plan":
        """A random plan."""
        steps = min(steps, LARGE_STEPS) if large else steps
        shapes = _large_shapes(rng) if large else _shapes(rng)
        size = int(rng.integers(1, 5))
        restarts = {0: [list(shapes)]}
        for step in range(1, steps):
            if rng.random() < 0.1:
                restarts[step] = _buckets([str(name) for name in rng.permutation(list(shapes))], rng)
        nonfinite = {step: int(rng.integers(size)) for step in range(steps) if rng.random() < 0.08}
        idle: dict[int, tuple[str, int | None]] = {}
        for step in range(steps):
            if rng.random() < 0.3:
                worker = None if rng.random() < 0.5 else int(rng.integers(size))
                idle[step] = str(rng.choice(list(shapes))), worker
        return Plan(reducer, size, shapes, steps, int(rng.integers(2**31)), restarts, nonfinite, idle)

    @property
    def is_large(self) -> bool:
        """Whether it has a bucket of the size of real ones."""
        return sum(map(math.prod, self.shapes.values())) >= LARGE

    def idle_everywhere(self, step: int) -> frozenset[str]:
        """The tensors that no worker has a gradient of in a step in which all is finite."""
        name, worker = self.idle.get(step, ("", 0))
        return frozenset([name]) if name and (worker is None or self.size == 1) else frozenset()

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step; it drops from time to time."""
        return 0.1 * 0.5 ** (step // 5)

    def gradient(self, rank: int, step: int) -> dict[str, Tensor]:
        """The gradient of one worker in one step, by tensor, with a NaN or an infinity if the plan has one."""
        rng = np.random.default_rng([self.seed, rank, step])
        scale = 10.0 ** rng.uniform(-3, 0)
        whole = {n: _laplace(rng, scale, s) for n, s in self.shapes.items()}
        name, worker = self.idle.get(step, ("", None))
        if name and worker in (None, rank):
            whole[name].zero_()
        if self.nonfinite.get(step) == rank:
            tensor = whole[str(rng.choice(list(whole)))].view(-1)
            tensor[rng.integers(tensor.numel())] = float(rng.choice([np.nan, np.inf, -np.inf]))
        return whole


def _shapes(rng: np.random.Generator) -> dict[str, tuple[int, ...]]:
    largest = int(rng.choice([4, 20, 60]))
    sides = rng.integers(1, largest + 1, (int(rng.integers(1, len(TENSORS) + 1)), 2))
    return {
        name: tuple(map(int, s[: 1 + (i % 2 == 0)])) for i, (name, s) in enumerate(zip(TENSORS, sides, strict=False))
    }


def _large_shapes(rng: np.random.Generator) -> dict[str, tuple[int, ...]]:
    """Two matrices and a bias, together LARGE to twice LARGE; the whole begins in one bucket."""
    rows = int(rng.integers(700, 2600))
    shapes = {"a.weight": (rows, 800), "a.bias": (int(rng.integers(1, 900)),)}
    missing = LARGE - sum(map(math.prod, shapes.values()))
    return {**shapes, "b.weight": (-(-missing // 512) + 1, 512)} if missing > 0 else shapes


def _laplace(rng: np.random.Generator, scale: float, shape: tuple[int, ...]) -> Tensor:
    signs = rng.integers(0, 2, shape, dtype=np.int8) * 2 - 1  # this and the next are faster than rng.laplace
    return torch.from_numpy(rng.standard_exponential(shape, dtype=np.float32) * signs * np.float32(scale))


def _buckets(names: list[str], rng: np.random.Generator) -> list[list[str]]:
    """Names in one or more buckets."""
    ends = sorted({len(names), *map(int, rng.integers(1, len(names) + 1, rng.integers(0, 3)))})
    return [names[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@dataclass
class _Part:
    """One bucket of a worker, with its state."""

    layout: Layout
    state: State


class _Worker:
    """One worker of an episode: its buckets, and the sums that are compared at the end."""

    def __init__(self, plan: Plan, comm: Comm):
        self.plan, self.comm = plan, comm
        self.parts: list[_Part] = []
        zeros = {name: torch.zeros(math.prod(shape), dtype=torch.float64) for name, shape in plan.shapes.items()}
        self.given, self.sent = zeros, {name: z.clone() for name, z in zeros.items()}
        self.largest = 0.0
        self.digests: list[int] = []

    def restart(self, buckets: list[list[str]]) -> None:
        """Save all states, and load them into fresh ones of other buckets."""
        pieces: dict[str, State] = {}
        for part in self.parts:
            pieces |= {name: states.copy(piece) for name, piece in states.split(part.state, part.layout).items()}
        self.parts = []
        for names in buckets:
            layout = Layout(tuple(names), tuple(self.plan.shapes[name] for name in names), seed=self.plan.seed)
            state = self.plan.reducer.init(layout, self.comm)
            states.merge(pieces, state, layout)
            self.parts.append(_Part(layout, state))

    def step(self, number: int) -> None:
        """Reduce one gradient in all buckets, then commit or roll back all of them."""
        gradient = self.plan.gradient(self.comm.rank, number)
        before = [states.copy(part.state) for part in self.parts] if number in self.plan.nonfinite else []
        reduced = [self._reduce(part, gradient, number) for part in self.parts]
        finite = all(bool(out.isfinite().all()) for _, _, out in reduced)
        expected = number not in self.plan.nonfinite
        assert finite == expected, f"step {number}: finite is {finite}, non-finite are {self.plan.nonfinite}"
        for part, (_, rest, out) in zip(self.parts, reduced, strict=True):
            idle = self.plan.idle_everywhere(number)
            states.hold(part.state, part.layout, idle)
            (states.commit if finite else states.roll_back)(part.state)
            for nothing in part.layout.ranges(idle):  # as an engine leaves it
                rest[nothing], out[nothing] = 0.0, 0.0
        if finite:
            for part, (given, rest, out) in zip(self.parts, reduced, strict=True):
                self._count(part, given, rest, out)
        else:
            after = [states.copy(part.state) for part in self.parts]
            assert same_states(before, after), f"step {number} changed a state, and was rolled back"

    def _reduce(self, part: _Part, gradient: dict[str, Tensor], number: int) -> tuple[Tensor, Tensor, Tensor]:
        """What one bucket contributes, what is left in ``x``, and the mean."""
        reducer, layout = self.plan.reducer, part.layout
        x = torch.cat([gradient[name].reshape(-1) for name in layout.names])
        idle = idle_tensors(x, layout) if self.plan.idle else None
        step = Step(layout, number, self.plan.learning_rate(number), squares(x), idle)
        given, out = contribution(reducer, layout, part.state, x.clone(), self.comm.size), torch.empty_like(x)
        for nothing in layout.ranges(idle or ()):
            given = given.clone() if given is x else given
            given[nothing] = 0.0  # whatever would have been done with a gradient of zeros
        finish(reducer.start(step, x, out, part.state, self.comm), out)
        self.digests.append(hash(out.numpy().tobytes()))
        return given, x, out

    def _count(self, part: _Part, given: Tensor, rest: Tensor, out: Tensor) -> None:
        layout = part.layout
        residual = self.plan.reducer.residual(layout, part.state)
        seen = [given, out] if residual is None else [given, out, residual]
        self.largest = max(self.largest, *(float(t.abs().max()) for t in seen))
        # What is left in x is the caller's: it was neither sent nor remembered.
        vectors = (v.split(layout.sizes) for v in (given.double() - rest.double(), out.double()))
        for name, left, mean in zip(layout.names, *vectors, strict=True):
            self.given[name] += left
            self.sent[name] += mean

    def end(self) -> "Outcome":
        """The outcome, to be compared with those of other workers."""
        late: dict[str, Tensor] = {}
        for part in self.parts:
            residual = held(self.plan.reducer, part.state, part.layout)
            late |= dict(zip(part.layout.names, residual.split(part.layout.sizes), strict=True))
        left = {name: self.given[name] - late[name].double() for name in self.plan.shapes}
        return Outcome(self.digests, left, self.sent, self.largest)


def same_states(one: list[State], other: list[State]) -> bool:
    """Whether the states of several buckets are equal."""
    return all(same(a, b) for a, b in zip(one, other, strict=True))


@dataclass
class Outcome:
    """One worker's results of an episode."""

    digests: list[int]
    left: dict[str, Tensor]  # sum of gradients minus the residual, which must have been sent
    sent: dict[str, Tensor]
    largest: float


def episode(plan: Plan) -> float:
    """Runs a plan on threads; returns the error of conservation in units of what is allowed."""

    def work(comm: Comm) -> Outcome:
        worker = _Worker(plan, comm)
        for step in range(plan.steps):
            if step in plan.restarts:
                worker.restart(plan.restarts[step])
            worker.step(step)
        return worker.end()

    outcomes = threads.run(plan.size, work)
    for rank, outcome in enumerate(outcomes):
        assert outcome.digests == outcomes[0].digests, f"rank {rank} holds other means than rank 0"
    return conservation(plan, outcomes)


def conservation(plan: Plan, outcomes: list[Outcome]) -> float:
    """|sum of means - mean of (given - residual)| in units of what rounding and ``loses`` explain; at most 1."""
    largest = max(o.largest for o in outcomes)
    each = largest * (2.0**-24 * plan.size + plan.reducer.loses(plan.size)) + plan.size * 2.0**-148
    allowed, worst = plan.steps * each, 0.0
    for name in plan.shapes:
        want = torch.stack([o.left[name] for o in outcomes]).mean(0)
        worst = max(worst, float((outcomes[0].sent[name] - want).abs().max()) / allowed)
    assert worst <= 1.0, f"something was lost or made: off by {worst * allowed:.3g}, allowed {allowed:.3g}"
    return worst


# ---- one episode in real processes ----------------------------------------------------------------


def _serve(rank: int, size: int, folder: str, spec: str, seed: int, steps: int, large: bool, pipe: Any) -> None:
    """A process of an episode under real DDP: attach, train, save, restart with other buckets and ranks, train."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        pipe.send((True, _train(rank, folder, spec, seed, steps, large)))
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
    dist.destroy_process_group()


def _net(width: int) -> Any:
    from torch import nn

    class Net(nn.Module):
        """A branch is used in every third step."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(20, width), nn.Linear(width, 5)
            self.often, self.rare = nn.Linear(width, width), nn.Linear(width, 8)

        def forward(self, x: Tensor, step: int) -> Tensor:
            hidden = self.first(x).tanh()
            out: Tensor = self.last(self.often(hidden).tanh())
            return out + self.rare(hidden).sum() if step % 3 == 0 else out

    return Net()


def _ranks_after(spec: str, size: int, seed: int) -> int:
    """How many ranks go on after the restart: one less, unless what is remembered cannot be averaged."""
    return size if "LowMemory" in spec or size < 3 or seed % 2 else size - 1


def _train(rank: int, folder: str, spec: str, seed: int, steps: int, large: bool) -> list[str]:
    """Digests of the weights after every step that this rank takes part in."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(seed)
    size = dist.get_world_size()
    width, caps = (1030, (25.0, 4.5)) if large else (50, (0.01, 0.004))  # floats of a layer, MB of a bucket
    net, generator = _net(width), torch.Generator().manual_seed(1000 * seed + rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    fewer = list(range(_ranks_after(spec, size, seed)))
    groups = dist.new_group(fewer), dist.new_group(fewer)
    digests: list[str] = []
    for part, cap in enumerate(caps):  # the second is a restart
        if part and rank not in fewer:
            break
        for_ddp, ours = groups if part else (None, None)
        model = DistributedDataParallel(net, bucket_cap_mb=cap, find_unused_parameters=True, process_group=for_ddp)
        handle = attach(model, spec, optimizer=optimizer, nonfinite="skip", check_replicas=7, group=ours)
        if part:
            files = [os.path.join(folder, f"{other}.pt") for other in range(size)]
            handle.load_state_dict(torch.load(file, weights_only=True) for file in files)
        digests += [_step(model, optimizer, generator, step, rank) for step in range(steps // 2)]
        assert handle.metrics()["nonfinite_steps"] == 1, "a NaN was not noticed"
        assert all(bool(p.isfinite().all()) for p in net.parameters()), "a NaN reached the weights"
        torch.save(handle.state_dict(), os.path.join(folder, f"{rank}.pt"))
        dist.barrier(for_ddp)
        handle.close()
    return digests


def _step(model: Any, optimizer: torch.optim.Optimizer, generator: torch.Generator, step: int, rank: int) -> str:
    """One step; the digest of the weights after it."""
    x = torch.randn(8, 20, generator=generator)
    if step == NAN_STEP and rank == 0:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    model(x, step).square().mean().backward()
    optimizer.step()
    return sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def in_processes(spec: str, size: int, seed: int, steps: int, large: bool = False) -> None:
    """An episode of a model under DDP in real gloo processes; all must hold the same weights after every step."""
    context = multiprocessing.get_context("forkserver")  # which imports once, for all processes to come
    context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "tersegrad.kernels.cpu", "tersegrad"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, folder, spec, seed, steps, large, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        answers = [pipe.recv() if pipe.poll(600) else (False, "no answer in 600 s") for pipe in pipes]
        for process in processes:
            process.kill() if not all(ok for ok, _ in answers) else process.join()
    for rank, (ok, answer) in enumerate(answers):
        assert ok, f"rank {rank}: {answer}"
        assert answer == answers[0][1][: len(answer)], f"rank {rank} holds other weights than rank 0"


# ---- the run --------------------------------------------------------------------------------------


def soak(steps: int, seed: int, processes: bool = True, say: Callable[[str], None] = lambda text: None) -> Tally:
    """Episodes until so many steps are done; raises AssertionError at the first that fails, with how to repeat it.

    Args:
        steps: of all episodes together.
        seed: determines everything.
        processes: whether some episodes run in real processes.
        say: called with one line per episode.

    Returns:
        The counts and measurements of the run.
    """
    rng, tally, everything = np.random.default_rng(seed), Tally(), methods()
    tracemalloc.start()
    while tally.steps < steps:
        tally.episodes += 1
        real = processes and tally.episodes % IN_PROCESSES == 0
        plan = _draw(everything, rng, tally.episodes, min(STEPS, steps - tally.steps), real)
        try:
            _run(plan, real, tally)
        except Exception as error:
            error.add_note(f"episode {tally.episodes} of seed {seed}: {'in processes, ' if real else ''}{plan}")
            raise
        _count(tally, plan, real)
        say(f"{tally.steps:7} steps, {tally.resident[-1] >> 20} MiB resident: {plan.reducer!r} on {plan.size}")
    tracemalloc.stop()
    _assert_no_growth(tally)
    return tally


def _draw(everything: list[Reducer], rng: np.random.Generator, episode: int, steps: int, real: bool) -> Plan:
    """A random plan; in real processes without methods that need per-sample squares, which the model does not give."""
    pool = [r for r in everything if needs_of(r).squares is None] if real else everything
    reducer = with_phases(pool[rng.integers(len(pool))], rng)
    large = episode // IN_PROCESSES % 2 == 0 if real else episode % WITH_LARGE == 2
    return Plan.drawn(reducer, rng, steps, large)


def _run(plan: Plan, real: bool, tally: Tally) -> None:
    if real:
        in_processes(repr(plan.reducer), plan.size, plan.seed, max(plan.steps, 2 * NAN_STEP + 2), plan.is_large)
    else:
        tally.worst = max(tally.worst, episode(plan))


def _count(tally: Tally, plan: Plan, real: bool) -> None:
    tally.steps += plan.steps
    tally.process_steps += plan.steps if real else 0
    tally.restarts += 1 if real else len(plan.restarts) - 1
    tally.large_steps += plan.steps if plan.is_large else 0
    tally.nonfinite += 2 if real else len(plan.nonfinite)
    tally.methods[type(plan.reducer).__name__] += plan.steps
    tally.sizes[plan.size] += plan.steps
    gc.collect()
    _give_back_memory()
    tally.traced.append(tracemalloc.get_traced_memory()[0])
    with open("/proc/self/statm") as file:
        tally.resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def _give_back_memory() -> None:
    """Return freed memory to the system, if the C library can: it would count as resident."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def growth(samples: list[int]) -> int:
    """Median of the last quarter minus median of the first, of the samples after a third as warm-up."""
    warm = samples[len(samples) // 3 :]
    quarter = max(1, len(warm) // 4)
    return int(statistics.median(warm[-quarter:]) - statistics.median(warm[:quarter]))


def _assert_no_growth(tally: Tally) -> None:
    for name, samples in (("resident set", tally.resident), ("traced memory", tally.traced)):
        assert growth(samples) <= GROWTH, f"the {name} grew by {growth(samples) >> 20} MiB after warm-up"


def main(arguments: list[str] | None = None) -> int:
    """Soaks and prints a short table."""
    parser = argparse.ArgumentParser(prog="python -m tersegrad.lab.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads-only", action="store_true", help="no real processes")
    parser.add_argument("--verbose", action="store_true", help="print a line per episode")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    say: Callable[[str], None] = (lambda text: print(text, flush=True)) if options.verbose else (lambda text: None)
    tally = soak(options.steps, options.seed, not options.threads_only, say)
    print(f"seed {options.seed}: {tally.steps} steps in {tally.episodes} episodes, nothing found")
    print(f"  in real processes   {tally.process_steps} steps")
    print(f"  in large buckets    {tally.large_steps} steps")
    print(f"  by workers          {', '.join(f'{n}: {c}' for n, c in sorted(tally.sizes.items()))}")
    print(f"  restarts            {tally.restarts}")
    print(f"  steps with NaN/Inf  {tally.nonfinite}")
    print(f"  conservation        worst error {tally.worst:.4f} of what rounding and stated losses explain")
    resident, traced = growth(tally.resident) / 2**20, growth(tally.traced) / 2**20
    print(f"  memory growth       resident {resident:+.1f} MiB, traced by Python {traced:+.2f} MiB, after warm-up")
    print(f"  methods             {', '.join(f'{n}: {c}' for n, c in tally.methods.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
