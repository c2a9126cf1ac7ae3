"""Long runs of everything at random: methods, sizes, restarts, NaNs; replicas, conservation and memory are watched.

    python -m tersegrad.lab.soak --steps 10000 --seed 0

Most steps run on workers that are threads (ThreadComm); every tenth episode runs in real gloo processes through
``attach``. An episode is one method on one bucket (or model) for some dozen steps. In it, states are saved and loaded
into fresh reducers over other cuts of the same tensors, and single elements become NaN or infinite. Watched:

- replicas: the same bits on all workers in every step;
- poison: a step with a NaN on one worker is non-finite on all, and what is remembered stays what it was;
- conservation: sum of means + mean of what a flush would send == sum of mean gradients, to rounding, for methods that
  conserve and remember; NaN steps left out;
- memory: after a third of the run as warm-up, neither the resident set nor what Python has allocated may grow by more
  than GROWTH (medians of the last and the first quarter of the samples after warm-up).
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tersegrad.comm.torch import threads
from tersegrad.core import Bucket, Comm, Compressor, Reducer, State
from tersegrad.core import state as states
from tersegrad.reducers import AllGather, Ring, TwoShot
from tersegrad.specs.parse import PRESETS, parse, registry
from tersegrad.testing.inputs import squares
from tersegrad.testing.runs import held
from tersegrad.wrappers import ErrorFeedback

GROWTH = 48 << 20  # bytes: two hundred buckets of the largest size that is used; a leak of one a step is ten times more
STEPS = 30  # of an episode
IN_PROCESSES = 10  # every so manieth episode runs in real processes
TENSORS = ("a.weight", "a.bias", "b.weight", "c.weight", "d.bias")


@dataclass
class Tally:
    """What has been run."""

    steps: int = 0
    process_steps: int = 0
    episodes: int = 0
    restarts: int = 0
    poisoned: int = 0
    worst: float = 0.0  # error of conservation, relative to what is allowed
    methods: Counter[str] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    resident: list[int] = field(default_factory=list)  # bytes after every episode
    traced: list[int] = field(default_factory=list)


def methods() -> list[Reducer]:
    """Every reducer's examples, every compressor in three exchanges with and without memory, and the presets."""
    classes = [cls for cls in registry().values() if cls.__module__.startswith("tersegrad.")]
    examples = [parse(text) for cls in classes for text in cls.examples or (f"{cls.__name__}()",)]
    found = [spec for spec in examples if isinstance(spec, Reducer)]
    codecs = [spec for spec in examples if isinstance(spec, Compressor)]
    exchanges = [exchange(codec) for codec in codecs for exchange in (AllGather, Ring, TwoShot)]
    found += exchanges + [ErrorFeedback(exchange) for exchange in exchanges]
    found += [spec for spec in (parse(preset.spec) for preset in PRESETS.values()) if isinstance(spec, Reducer)]
    return list({repr(spec): spec for spec in found}.values())


# ---- one episode among threads --------------------------------------------------------------------


@dataclass
class Plan:
    """What happens in one episode, the same on all workers."""

    reducer: Reducer
    size: int
    shapes: dict[str, tuple[int, ...]]
    steps: int
    seed: int
    restarts: dict[int, list[list[str]]]  # before which step, and how the tensors are cut into buckets from then on
    poison: dict[int, int]  # in which step, and on which worker

    @staticmethod
    def drawn(reducer: Reducer, rng: np.random.Generator, steps: int = STEPS) -> "Plan":
        """All by chance."""
        largest = int(rng.choice([4, 20, 60]))
        count = int(rng.integers(1, len(TENSORS) + 1))
        sides = rng.integers(1, largest + 1, (count, 2))
        shapes = {
            name: tuple(map(int, s[: 1 + (i % 2 == 0)]))
            for i, (name, s) in enumerate(zip(TENSORS, sides, strict=False))
        }
        size = int(rng.integers(1, 5))
        restarts = {0: [list(shapes)]}
        for step in range(1, steps):
            if rng.random() < 0.1:
                restarts[step] = _cut([str(name) for name in rng.permutation(list(shapes))], rng)
        poison = {step: int(rng.integers(size)) for step in range(steps) if rng.random() < 0.08}
        return Plan(reducer, size, shapes, steps, int(rng.integers(2**31)), restarts, poison)

    def gradient(self, rank: int, step: int) -> dict[str, Tensor]:
        """Of one worker in one step, by tensor, poisoned where it shall be."""
        rng = np.random.default_rng([self.seed, rank, step])
        scale = 10.0 ** rng.uniform(-3, 0)
        whole = {
            n: torch.from_numpy(rng.laplace(scale=scale, size=s).astype(np.float32)) for n, s in self.shapes.items()
        }
        if self.poison.get(step) == rank:
            tensor = whole[str(rng.choice(list(whole)))].view(-1)
            tensor[rng.integers(tensor.numel())] = float(rng.choice([np.nan, np.inf, -np.inf]))
        return whole


def _cut(names: list[str], rng: np.random.Generator) -> list[list[str]]:
    """Names in one or more buckets."""
    ends = sorted({len(names), *map(int, rng.integers(1, len(names) + 1, rng.integers(0, 3)))})
    return [names[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@dataclass
class _Part:
    """One bucket of a worker, with its state."""

    bucket: Bucket
    state: State


class _Worker:
    """One worker of an episode: its buckets, and the sums that are compared at the end."""

    def __init__(self, plan: Plan, comm: Comm):
        self.plan, self.comm = plan, comm
        self.parts: list[_Part] = []
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in plan.shapes.items()}
        self.given, self.sent = zeros, {name: z.clone() for name, z in zeros.items()}
        self.largest = 0.0
        self.digests: list[int] = []

    def restart(self, cut: list[list[str]]) -> None:
        """All states saved, and loaded into fresh ones of other buckets."""
        pieces: dict[str, State] = {}
        for part in self.parts:
            pieces |= {name: states.copy(piece) for name, piece in states.cut(part.state, part.bucket).items()}
        self.parts = []
        for names in cut:
            bucket = Bucket(tuple(names), tuple(self.plan.shapes[name] for name in names), seed=self.plan.seed)
            state = self.plan.reducer.init(bucket, self.comm)
            states.paste(pieces, state, bucket)
            self.parts.append(_Part(bucket, state))

    def step(self, step: int) -> None:
        """One gradient: reduced in all buckets, then kept in all or in none."""
        gradient, finite = self.plan.gradient(self.comm.rank, step), True
        means: dict[str, tuple[Tensor, Tensor]] = {}
        before = self._held() if step in self.plan.poison else {}
        for part in self.parts:
            x = torch.cat([gradient[name].reshape(-1) for name in part.bucket.names])
            part.bucket.step, part.bucket.lr, part.bucket.squares = step, 0.1, squares(x)
            out = torch.empty_like(x)
            rest = x
            self.plan.reducer.reduce(part.bucket, rest, out, part.state, self.comm)
            finite = finite and bool(out.isfinite().all())
            pieces = zip(out.split(part.bucket.sizes), rest.split(part.bucket.sizes), strict=True)
            means |= dict(zip(part.bucket.names, pieces, strict=True))
            self.digests.append(hash(out.numpy().tobytes()))
        assert finite == (step not in self.plan.poison), f"step {step}: finite is {finite}, poison {self.plan.poison}"
        for part in self.parts:
            states.settle(part.state, keep=finite)
        if finite:
            self._count(gradient, means)
        else:
            after = self._held()
            assert all(torch.equal(before[name], after[name]) for name in before), f"step {step} changed a memory"

    def _count(self, gradient: dict[str, Tensor], means: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, (mean, rest) in means.items():
            shape = self.plan.shapes[name]
            self.given[name] += gradient[name].double() - rest.view(shape).double()  # a rest is the caller's own
            self.sent[name] += mean.view(shape).double()
            self.largest = max(self.largest, float(gradient[name].abs().max()), float(mean.abs().max()))

    def _held(self) -> dict[str, Tensor]:
        """What a flush would send, by tensor."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            flat = held(self.plan.reducer, part.state, part.bucket)
            found |= dict(zip(part.bucket.names, flat.split(part.bucket.sizes), strict=True))
        return found

    def end(self) -> "Outcome":
        """What is compared with the others."""
        late = self._held()
        rest = {n: self.given[n] - late[n].view(s).double() for n, s in self.plan.shapes.items()}
        return Outcome(self.digests, rest, self.sent, self.largest)


@dataclass
class Outcome:
    """One worker's end of an episode."""

    digests: list[int]
    left: dict[str, Tensor]  # gradients minus what is still remembered: what must have been sent
    sent: dict[str, Tensor]
    largest: float


def episode(plan: Plan) -> float:
    """Runs a plan among threads; returns the error of conservation in units of what is allowed."""

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
    """|sum of means - mean of (gradients - memory)| in units of what rounding explains; asserted to be at most 1."""
    if not plan.reducer.conserves:
        return 0.0
    allowed = plan.steps * (2.0**-24 * plan.size * max(o.largest for o in outcomes) + plan.size * 2.0**-148)
    worst = 0.0
    for name in plan.shapes:
        want = torch.stack([o.left[name] for o in outcomes]).mean(0)
        worst = max(worst, float((outcomes[0].sent[name] - want).abs().max()) / allowed)
    assert worst <= 1.0, f"something was lost or made: off by {worst * allowed:.3g}, allowed {allowed:.3g}"
    return worst


# ---- one episode in real processes ----------------------------------------------------------------


def _serve(rank: int, size: int, store: str, spec: str, seed: int, steps: int, pipe: Any) -> None:
    """A process of an episode under real DDP: attach, train, save, begin anew with another cut, train."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        pipe.send((True, _train(rank, spec, seed, steps)))
    except BaseException as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
    dist.destroy_process_group()


def _train(rank: int, spec: str, seed: int, steps: int) -> list[str]:
    """Digests of the weights after every step."""
    from hashlib import sha256

    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from tersegrad.hosts.ddp import attach

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    digests, saved, generator = [], None, torch.Generator().manual_seed(1000 * seed + rank)
    for part in range(2):  # the second is a restart
        model = DistributedDataParallel(net, bucket_cap_mb=0.004 if part else 0.01)
        handle = attach(model, spec, optimizer=optimizer, nonfinite="skip", check_replicas=7)
        if saved is not None:
            handle.load_state_dict(saved)
        for step in range(steps // 2):
            x = torch.randn(8, 20, generator=generator)
            if step == 3 and rank == 0:
                x[0, 0] = float("nan")
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
            digests.append(sha256(weights).hexdigest())
        assert handle.metrics()["nonfinite_steps"] == 1, "a NaN was not noticed"
        assert all(bool(p.isfinite().all()) for p in net.parameters()), "a NaN reached the weights"
        saved = handle.state_dict()
        handle.close()
    return digests


def in_processes(spec: str, size: int, seed: int, steps: int) -> None:
    """An episode of a model under DDP in real gloo processes; all must hold the same weights after every step."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            args = (rank, size, os.path.join(folder, "store"), spec, seed, steps, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        answers = [pipe.recv() if pipe.poll(600) else (False, "no answer in 600 s") for pipe in pipes]
        for process in processes:
            process.kill() if not all(ok for ok, _ in answers) else process.join()
    for rank, (ok, answer) in enumerate(answers):
        assert ok, f"rank {rank}: {answer}"
        assert answer == answers[0][1], f"rank {rank} holds other weights than rank 0"


# ---- the run --------------------------------------------------------------------------------------


def soak(steps: int, seed: int, processes: bool = True, say: Callable[[str], None] = lambda text: None) -> Tally:
    """Episodes until so many steps are done; raises AssertionError at the first that fails, with how to repeat it."""
    rng, tally, everything = np.random.default_rng(seed), Tally(), methods()
    plain = [reducer for reducer in everything if not any(isinstance(p, Reducer) and p.squares for p in reducer.walk())]
    tracemalloc.start()
    while tally.steps < steps:
        tally.episodes += 1
        real = processes and tally.episodes % IN_PROCESSES == 0
        pool = plain if real else everything
        reducer = pool[rng.integers(len(pool))]
        plan = Plan.drawn(reducer, rng, min(STEPS, steps - tally.steps))
        try:
            if real:
                in_processes(repr(reducer), plan.size, plan.seed, plan.steps)
            else:
                tally.worst = max(tally.worst, episode(plan))
        except Exception as error:
            error.add_note(f"episode {tally.episodes} of seed {seed}: {'in processes, ' if real else ''}{plan}")
            raise
        _count(tally, plan, real)
        say(f"{tally.steps:7} steps, {tally.resident[-1] >> 20} MiB resident: {reducer!r} on {plan.size}")
    tracemalloc.stop()
    _assert_no_growth(tally)
    return tally


def _count(tally: Tally, plan: Plan, real: bool) -> None:
    tally.steps += plan.steps
    tally.process_steps += plan.steps if real else 0
    tally.restarts += 1 if real else len(plan.restarts) - 1
    tally.poisoned += 2 if real else len(plan.poison)
    tally.methods[type(plan.reducer).__name__] += plan.steps
    tally.sizes[plan.size] += plan.steps
    gc.collect()
    tally.traced.append(tracemalloc.get_traced_memory()[0])
    with open("/proc/self/statm") as file:
        tally.resident.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


def growth(samples: list[int]) -> int:
    """Median of the last quarter minus median of the first, of what comes after a third as warm-up."""
    warm = samples[len(samples) // 3 :]
    quarter = max(1, len(warm) // 4)
    return int(statistics.median(warm[-quarter:]) - statistics.median(warm[:quarter]))


def _assert_no_growth(tally: Tally) -> None:
    for name, samples in (("resident set", tally.resident), ("traced memory", tally.traced)):
        assert growth(samples) <= GROWTH, f"the {name} grew by {growth(samples) >> 20} MiB after warm-up"


def main(arguments: list[str] | None = None) -> int:
    """Runs and prints a short table."""
    parser = argparse.ArgumentParser(prog="python -m tersegrad.lab.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads-only", action="store_true", help="no real processes")
    parser.add_argument("--verbose", action="store_true", help="say every episode")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    say: Callable[[str], None] = (lambda text: print(text, flush=True)) if options.verbose else (lambda text: None)
    tally = soak(options.steps, options.seed, not options.threads_only, say)
    print(f"seed {options.seed}: {tally.steps} steps in {tally.episodes} episodes, nothing found")
    print(f"  in real processes   {tally.process_steps} steps")
    print(f"  by workers          {', '.join(f'{n}: {c}' for n, c in sorted(tally.sizes.items()))}")
    print(f"  restarts            {tally.restarts}")
    print(f"  steps with NaN/Inf  {tally.poisoned}")
    print(f"  conservation        worst error {tally.worst:.4f} of what rounding explains")
    resident, traced = growth(tally.resident) / 2**20, growth(tally.traced) / 2**20
    print(f"  memory growth       resident {resident:+.1f} MiB, traced by Python {traced:+.2f} MiB, after warm-up")
    print(f"  methods             {', '.join(f'{n}: {c}' for n, c in tally.methods.most_common())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
