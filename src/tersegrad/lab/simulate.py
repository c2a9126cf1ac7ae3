"""``tersegrad simulate``: several specs and seeds, one run each, kept in a folder and never made twice."""

import copy
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tersegrad.comm.units import parse_rate, parse_time
from tersegrad.core import version
from tersegrad.core.environment import environment
from tersegrad.hosts import Training
from tersegrad.hosts._randomness import Randomness, undisturbed
from tersegrad.hosts.simulate import require_decisions
from tersegrad.hosts.training import make
from tersegrad.lab import factories, report, workloads
from tersegrad.lab.factories import Factory
from tersegrad.lab.results import Run, Spread, compare, read_run
from tersegrad.lab.train import (
    RunFailedError,
    add_bar,
    command_line,
    file_name,
    is_finished,
    read_events,
    show,
    show_progress,
)
from tersegrad.lab.until import Until
from tersegrad.lab.virtual_run import RunConfig, VirtualRun
from tersegrad.plan import model as plans
from tersegrad.plan.cost import Link
from tersegrad.plan.step_time import StepTime
from tersegrad.plan.timeline import Compute
from tersegrad.specs import loaded_modules, parse_reducer

_POLL = 0.2  # seconds between two looks at the runs
# glibc gives memory back after every pass and takes it again page by page, which is a fifth of the time of a small net.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}


@dataclass(frozen=True)
class Request:
    """Several specs and seeds in one setting."""

    specs: tuple[str, ...]
    workers: int
    steps: int
    seeds: tuple[int, ...]
    out: Path
    name: str  # of what is trained
    command: str
    source: dict[str, Any] | None = None  # arguments of factories.find, where runs are processes of their own
    bandwidth: str | None = None
    latency: str | None = None
    compute: str | None = None
    eval_every: int | None = None
    until: str | None = None
    bucket_cap_mb: int | None = None
    decisions: list[dict[str, Any]] | None = None
    snapshot_seconds: float = 180.0
    jobs: int = 1
    threads: int = 1
    processes: int = 1

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "jobs", "threads", "processes"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number from 1.")
        if self.processes > 1 and self.threads > 1:
            raise ValueError(
                "--processes and --threads: a forked process cannot use torch's threads. Give one of them."
            )
        if not self.specs or not self.seeds:
            raise ValueError("name at least one spec and one seed.")
        if self.compute is not None and self.bandwidth is None and self.latency is None:
            raise ValueError("--compute is for predicted times: say what the network is, e.g. --bandwidth 100Mbit.")
        for spec in self.specs:
            if spec.startswith("torch:"):
                raise ValueError(
                    f"{spec!r} is a hook of DDP, which only real processes can run. Use `train`.{_like(spec)}"
                )
            require_decisions(parse_reducer(spec), self.decisions)


def _like(hook: str) -> str:
    """Which of our specs computes the same, where one does."""
    return " For what it learns, not for its time: 'topk', with the same rule." if hook.startswith("torch:topk") else ""


def simulate(
    factory: Factory,
    specs: str | Sequence[str],
    *,
    workers: int,
    steps: int,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    compute: str | None = None,
    eval_every: int | None = None,
    until: str | None = None,
    bucket_cap_mb: int | None = None,
    decisions: Sequence[Mapping[str, Any]] | None = None,
    snapshot_seconds: float = 180.0,
) -> list[Run]:
    """Trains a model with N virtual workers in this process, once for every spec and seed.

    Args:
        factory: Returns a ``Training``; it is given those of ``seed``, ``workers``, ``steps`` and ``spec`` that it has
            parameters for.
        specs: Presets or expressions; "none" is what the others are compared with.
        workers: How many.
        steps: Of every run.
        seeds: One run each; they decide weights, dropout and batches as far as the factory lets them.
        out: Folder for the files and the report. A run that is there is not made again, an unfinished one goes on from
            its last snapshot. None: nothing is kept.
        bandwidth: Of every worker's link, e.g. "100Mbit", for predicted times.
        latency: One way, e.g. "20ms".
        compute: A step without communication, e.g. "250ms". Default: measured here.
        eval_every: Steps between two evaluations. Default: a twentieth of the run.
        until: Ends a run early, e.g. "accuracy >= 0.9".
        bucket_cap_mb: As in DistributedDataParallel. Larger than the model: one vector of all gradients.
        decisions: For ``auto``: ``handle.metrics()["decisions"]`` of a real run.
        snapshot_seconds: Between two snapshots, from which a killed run goes on.

    Returns:
        One record a run, spec by spec: ``run.curve`` has the scores, ``run.end`` the last one, bytes and time.

    Raises:
        ValueError: What cannot be simulated, and what to write instead.

    Example:
        >>> runs = tersegrad.simulate(factory, ["none", "topk4"], workers=16, steps=2000)  # doctest: +SKIP
    """
    with tempfile.TemporaryDirectory(prefix="tersegrad-simulate-") as temporary:
        request = Request(
            (specs,) if isinstance(specs, str) else tuple(specs),
            *(workers, steps, tuple(seeds), Path(temporary if out is None else out)),
            *(_name_of(factory), "tersegrad.simulate(...)"),
            bandwidth=bandwidth,
            latency=latency,
            compute=compute,
            eval_every=eval_every,
            until=until,
            bucket_cap_mb=bucket_cap_mb,
            decisions=None if decisions is None else [dict(one) for one in decisions],
            snapshot_seconds=snapshot_seconds,
            threads=torch.get_num_threads(),
        )
        configs = plan(request, factory)
        for config in _missing(configs):
            VirtualRun(config, factory).run()
        if out is not None:
            report.write_report(request.out)
        return [run for config in configs if (run := read_run(Path(config.file))) is not None]


def run(request: Request, console: Console) -> int:
    """Makes every run that is missing, each in a process of its own, and writes the report."""
    assert request.source is not None
    torch.set_num_threads(request.threads)
    configs = plan(request, factories.find(**request.source))
    missing = _missing(configs)
    if len(missing) < len(configs):
        console.print(f"{len(configs) - len(missing)} of {len(configs)} runs are in {request.out} already.")
    if missing:
        console.print(f"{request.name} on {request.workers} virtual workers, {request.steps} steps")
        _launch_all(missing, request.jobs, console)
    console.print(_table([run for config in configs if (run := read_run(Path(config.file))) is not None]))
    console.print(f"Report: {report.write_report(request.out)}")
    return 0


def _table(runs: Sequence[Run]) -> Table:
    """What most readers want to know first."""
    table = Table(box=None, pad_edge=False)
    (comparison, *_) = compare(runs)
    heads = ("spec", f"final {comparison.setting.metric}", "fewer bytes", "predicted ms / step")
    for head in heads[: 4 if comparison.setting.bandwidth or comparison.setting.latency else 3]:
        table.add_column(head, justify="left" if head == "spec" else "right")
    plain = None if comparison.baseline is None else comparison.baseline.spread(lambda run: run.step_sent)
    for group in comparison.groups:
        score = group.sound_spread(lambda run: None if run.end is None else run.end.score)
        sent, step = group.spread(lambda run: run.step_sent), group.spread(lambda run: run.step_seconds)
        fewer = "" if plain is None or sent is None or not sent.median else f"{plain.median / sent.median:.4g}x"
        cells = [group.name, "diverged" if score is None else _shown(score), fewer]
        table.add_row(*cells, *([] if step is None else [f"{1e3 * step.median:.4g}"]))
    return table


def _shown(score: Spread) -> str:
    """Median, and the range over several seeds."""
    return f"{score.median:.4g}" + (f" [{score.low:.4g}, {score.high:.4g}]" if score.count > 1 else "")


# ---- planning ------------------------------------------------------------------------------------


def plan(request: Request, factory: Factory) -> list[RunConfig]:
    """One config a run. What cannot work is refused now, and codecs are timed while nothing else runs."""
    request.out.mkdir(parents=True, exist_ok=True)
    configs = []
    for spec in request.specs:
        step_time = None
        for seed in request.seeds:
            training = make(factory, seed=seed, workers=request.workers, steps=request.steps, spec=spec)
            if request.until is not None:
                Until.parse(request.until).require(training.metric)
            if step_time is None and (request.bandwidth or request.latency):
                step_time = _step_time(request, spec, training)
            configs.append(_config(request, factory, spec, seed, training, step_time))
    return configs


def _config(
    request: Request, factory: Factory, spec: str, seed: int, training: Training, step_time: StepTime | None
) -> RunConfig:
    identity = _identity(request, factory, spec, seed, training)
    compute = None if step_time is None else 1e3 * step_time.compute.seconds
    start = {
        "spec": spec,
        "expression": identity["expression"],
        "workload": request.name,
        "metric": training.metric,
        "higher_is_better": training.higher_is_better,
        "workers": request.workers,
        "network": "simulated",
        "kernel_latency": False,
        "bandwidth": request.bandwidth,
        "latency": request.latency,
        "compute_ms": compute,
        "learning_rate": None,
        "batch": training.batch,
        "seed": seed,
        "parameters": sum(p.numel() for p in training.trained.values()),
        "steps": request.steps,
        "epochs": None,
        "limit_seconds": None,
        "until": request.until,
        "identity": identity,
        "command": request.command,
        "environment": {**environment(), "tersegrad": version.__version__},
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }
    return RunConfig(
        spec,
        request.workers,
        request.steps,
        seed,
        str((request.out / file_name(spec, seed, identity)).resolve()),
        start,
        eval_every=request.eval_every or max(1, request.steps // 20),
        log_every=max(1, min(10, request.steps // 20)),
        until=request.until,
        snapshot_seconds=request.snapshot_seconds,
        step_time=None if step_time is None else step_time.as_dict(),
        bucket_cap_mb=request.bucket_cap_mb,
        decisions=request.decisions,
        source=request.source if request.source is None else _plain(request.source),
        modules=loaded_modules(),
        threads=request.threads,
        processes=request.processes,
    )


def _plain(source: dict[str, Any]) -> dict[str, Any]:
    return {**source, "data": None if source["data"] is None else str(Path(source["data"]).resolve())}


def _identity(request: Request, factory: Factory, spec: str, seed: int, training: Training) -> dict[str, Any]:
    """Everything that decides the result of a run, or when it is looked at."""
    optimizer = training.optimizer
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    asked = ("workers", "steps", "bandwidth", "latency", "compute", "eval_every", "until", "threads")
    return {
        "expression": repr(parse_reducer(spec)),
        "what": request.name,
        "source": _digest(_source_of(factory)),
        "weights": _digest(*(p.detach() for p in training.model.state_dict().values())),
        "first batch": _digest(_first_batch(training, request.workers)),
        "optimizer": f"{type(optimizer).__name__} {groups}",
        "training": f"{training.metric} {training.max_norm} {training.accumulate} {training.carries}",
        "seed": seed,
        **{key: getattr(request, key) for key in asked},
        **({} if request.bucket_cap_mb is None else {"bucket_cap_mb": request.bucket_cap_mb}),
        "decisions": None if request.decisions is None else _digest(json.dumps(request.decisions)),
        "tersegrad": version.__version__,
        "torch": torch.__version__,
    }


def _source_of(factory: Factory) -> str:
    try:
        return inspect.getsource(factory)
    except (OSError, TypeError):
        return ""


def _first_batch(training: Training, workers: int) -> Any:
    with undisturbed(), Randomness.seeded(0).used():
        return next(iter(training.batches(0, workers, 0)), None)


def _digest(*values: Any) -> str:
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in value:
                add(key)
                add(value[key])
        elif isinstance(value, list | tuple):
            for one in value:
                add(one)
        elif isinstance(value, str | int | float | bool | None):
            digest.update(repr(value).encode())
        elif hasattr(value, "__dict__"):
            add(vars(value))

    add(values)
    return digest.hexdigest()[:16]


def _step_time(request: Request, spec: str, training: Training) -> StepTime:
    """The planner's inputs: the given link, and computation and codecs as measured here, on the model's gradient."""
    link = Link(
        bandwidth=parse_rate(request.bandwidth) if request.bandwidth else float("inf"),
        latency=parse_time(request.latency) if request.latency else 0.0,
    )
    twin = copy.deepcopy(training.model)
    with undisturbed(), Randomness.seeded(0).used():
        batch = next(iter(training.batches(0, request.workers, 0)))

        def loss() -> Tensor:
            value: Tensor = training.loss(twin, batch, None)[0] if training.carries else training.loss(twin, batch)
            return value

        timeline, buckets = (
            plans.measure(twin, loss) if request.compute is None else _given(request.compute, twin, loss)
        )
    gradients = plans.gradients_for(buckets, twin)
    return StepTime.measured(parse_reducer(spec), buckets, gradients, request.workers, link, timeline)


def _given(compute: str, twin: torch.nn.Module, loss: plans.Loss) -> tuple[Compute, list[Any]]:
    loss().backward()
    buckets = plans.buckets_of(twin)
    return plans.compute_of(parse_time(compute), buckets), buckets


# ---- processes -----------------------------------------------------------------------------------


def _missing(configs: list[RunConfig]) -> list[RunConfig]:
    return [config for config in configs if not is_finished(Path(config.file))]


def _launch_all(configs: list[RunConfig], jobs: int, console: Console) -> None:
    """So many processes, with a share of the runs each; where one fails, all end, and go on when they are repeated."""
    with tempfile.TemporaryDirectory(prefix="tersegrad-simulate-") as folder, show_progress(console) as progress:
        bars = {Path(config.file): add_bar(config.spec, config.seed, progress) for config in configs}
        started = [_launch(configs[job::jobs], Path(folder) / str(job)) for job in range(min(jobs, len(configs)))]
        try:
            while any(process.poll() is None for process, _ in started):
                time.sleep(_POLL)
                for file, bar in bars.items():
                    show(file, bar, progress)
                for process, log in started:
                    if process.poll():
                        raise RunFailedError(_last_words(process.returncode, log))
        finally:
            for process, _ in started:
                process.terminate()
                process.wait()
        for process, log in started:
            if process.returncode:
                raise RunFailedError(_last_words(process.returncode, log))
        for file, bar in bars.items():
            show(file, bar, progress)


def _launch(configs: list[RunConfig], about: Path) -> tuple["subprocess.Popen[bytes]", Path]:
    about.write_text(json.dumps([asdict(config) for config in configs]))
    log = about.with_suffix(".log")
    argv = [sys.executable, "-m", "tersegrad.lab.virtual_run", str(about)]
    own = {"OMP_NUM_THREADS": str(configs[0].threads), **KEEP_MEMORY}
    with log.open("wb") as out:
        return subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env={**own, **os.environ}), log


def _last_words(code: int, log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    kept = "Finished runs are kept, and the same command goes on from here."
    return f"a simulation ended with exit code {code}. {kept}\n" + "\n".join(lines[-30:])


def _name_of(factory: Factory) -> str:
    return f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', type(factory).__name__)}"


def from_arguments(args: Namespace) -> Request:
    """The request of a command line."""
    own = {"batch": args.batch, "learning_rate": args.learning_rate}
    if args.epochs is not None and args.workload is None:
        raise ValueError("--epochs is for a workload: say how many --steps a run of your own model has.")
    if args.steps is None and args.workload is None:
        raise ValueError("say how long a run is: --steps 2000.")
    return Request(
        tuple(args.spec),
        args.workers,
        args.steps or _steps_of(args.workload, args.epochs, args.workers, args.data, own),
        tuple(args.seeds),
        args.out,
        args.model or args.workload,
        command_line(),
        source={"model": args.model, "workload": args.workload, "data": args.data, **own},
        decisions=None if args.replay is None else read_decisions(args.replay),
        snapshot_seconds=parse_time(args.snapshot),
        **{
            key: getattr(args, key)
            for key in ("bandwidth", "latency", "compute", "eval_every", "until", "bucket_cap_mb")
        },
        **{key: getattr(args, key) for key in ("jobs", "threads")},
        processes=args.processes or (1 if args.threads > 1 else max(1, len(os.sched_getaffinity(0)) // args.jobs)),
    )


def _steps_of(workload: str, epochs: int | None, workers: int, data: Path | None, own: dict[str, Any]) -> int:
    found = replace(workloads.find(workload), **{k: v for k, v in own.items() if v is not None})
    return (epochs or found.epochs) * found.steps(found.load(data), workers)


def read_decisions(file: Path) -> list[dict[str, Any]]:
    """What auto decided by in a real run, from the run's file."""
    found = [event["decisions"] for event in read_events(file) if "decisions" in event]
    if not found:
        raise ValueError(f"--replay {file}: there are no decisions in it. It must be a finished run of auto.")
    decisions: list[dict[str, Any]] = found[-1]
    return decisions
