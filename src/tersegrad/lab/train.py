"""Training runs, one per method, over a slow link: started, watched, and kept in one file each."""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tersegrad.comm.units import parse_rate, parse_time
from tersegrad.core import version
from tersegrad.lab import network as networks
from tersegrad.lab import workloads
from tersegrad.lab.methods import Method
from tersegrad.lab.network import Network
from tersegrad.lab.worker import Config
from tersegrad.specs import loaded_modules

NETWORKS = ("auto", "netns", "throttled", "none")
_POLL = 0.1  # seconds between two looks at the workers and at their file
_GRACE = 5.0  # seconds that workers have to end by themselves


class RunFailedError(RuntimeError):
    """A worker failed; the message names it and has the end of its log."""


@dataclass(frozen=True)
class Plan:
    """The request: several methods in the same setting."""

    specs: tuple[str, ...]
    workload: str
    workers: int
    network: str
    bandwidth: str | None
    latency: str | None
    seeds: tuple[int, ...]
    epochs: int | None
    steps: int | None
    seconds: float | None
    data: Path | None
    out: Path
    command: str
    timeout: float = 300.0
    evaluate: bool = True
    eval_every: int | None = None  # evaluate every so many steps too, not only after an epoch
    batch: int | None = None  # per worker; None: the workload's own
    learning_rate: float | None = None  # the highest of the run; None: the workload's own
    bucket_cap_mb: int | None = None  # of DDP

    def configs(self) -> list[Config]:
        """One Config per method and seed; errors that can be detected now are raised now."""
        network = self._network()
        by_kernel = network == "netns" and self.latency is not None and networks.latency_supported()
        workloads.find(self.workload).load(self.data)
        configs = []
        for seed in self.seeds:
            for spec in self.specs:
                method = Method(spec)
                if method.peer and self.latency and network == "netns" and not by_kernel:
                    raise ValueError(
                        f"--latency {self.latency} with {spec!r} on --network netns: this kernel cannot delay packets, "
                        "and an emulated latency holds back our own hooks only. Leave the latency out, or use "
                        '--network throttled (with "none" and our own specs).'
                    )
                if method.torch_hook() and network == "throttled":
                    raise ValueError(f"{spec!r} talks past an emulated link. Use --network netns, or leave it out.")
                configs.append(self._config(spec, seed, network, by_kernel))
        return configs

    def _network(self) -> str:
        """The kind of network to use, once the rates have been read."""
        if self.bandwidth is not None:
            parse_rate(self.bandwidth)
        if self.latency is not None:
            parse_time(self.latency)
        if self.network == "none" and (self.bandwidth or self.latency):
            raise ValueError("--network none has no link to be slow. Leave --bandwidth and --latency out.")
        if self.network != "auto":
            return self.network
        if self.bandwidth is None and self.latency is None:
            return "none"
        return "throttled" if networks.permitted() else "netns"

    def _config(self, spec: str, seed: int, network: str, by_kernel: bool) -> Config:
        config = Config(
            spec=spec,
            workload=self.workload,
            workers=self.workers,
            network=network,
            bandwidth=self.bandwidth,
            latency=self.latency,
            seed=seed,
            epochs=self.epochs,
            steps=self.steps,
            seconds=self.seconds,
            data=str(self.data.resolve()) if self.data else None,
            file="",
            command=self.command,
            timeout=self.timeout,
            evaluate=self.evaluate,
            eval_every=self.eval_every,
            modules=loaded_modules(),
            batch=self.batch,
            learning_rate=self.learning_rate,
            bucket_cap_mb=self.bucket_cap_mb,
            kernel_latency=by_kernel,
        )
        identity = _identity(config)
        return replace(config, file=str((self.out / file_name(spec, seed, identity)).resolve()), identity=identity)


def file_name(spec: str, seed: int, identity: dict[str, Any]) -> str:
    """Of a run: whatever decides its result decides its name too, so that another run is another file."""
    slug = "".join(c if c.isalnum() or c in ".-=" else "_" for c in spec)[:60]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{slug}-{digest[:8]}-seed{seed}.jsonl"


def train(plan: Plan, console: Console) -> int:
    """Run every run that is missing. Finished runs are kept in any case, and not repeated."""
    configs = plan.configs()
    plan.out.mkdir(parents=True, exist_ok=True)
    missing = [config for config in configs if not is_finished(Path(config.file))]
    if len(missing) < len(configs):
        console.print(f"{len(configs) - len(missing)} of {len(configs)} runs are in {plan.out} already.")
    if not missing:
        return 0
    console.print(_describe(missing[0]))
    with open_network(missing[0]) as network, show_progress(console) as progress:
        for config in missing:
            make_runs([config], network, progress)
    return 0


def _describe(config: Config) -> str:
    kind = {"netns": "network namespaces", "throttled": "an EMULATED link", "none": "loopback, not slowed down"}
    rate = f" of {config.bandwidth}" if config.bandwidth else ""
    emulated = config.network == "netns" and not config.kernel_latency
    delay = f", {config.latency} one way{' (EMULATED)' if emulated else ''}" if config.latency else ""
    return f"{config.workload} on {config.workers} workers, {kind[config.network]}{rate}{delay}"


def _identity(config: Config) -> dict[str, Any]:
    """Everything that decides the result of a run, or when it is looked at."""
    asked = ("workload", "workers", "network", "bandwidth", "latency", "kernel_latency", "learning_rate", "batch")
    length = ("steps", "seconds", "evaluate", "eval_every", "seed", "threads")
    return {
        **{key: getattr(config, key) for key in (*asked, *length)},
        "epochs": config.planned_epochs,
        "expression": Method(config.spec).expression,
        **({} if config.bucket_cap_mb is None else {"bucket_cap_mb": config.bucket_cap_mb}),
        "tersegrad": version.__version__,
        "torch": torch.__version__,
    }


def read_events(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's file so far."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # what follows the last newline is still being written
    return [json.loads(line) for line in lines]


@contextmanager
def open_network(config: Config) -> Iterator[Network | None]:
    """The namespaces that a run needs, if it needs any."""
    if config.network != "netns":
        yield None
        return
    reason = networks.permitted()
    if reason is not None:
        raise ValueError(f"--network netns: {reason} Use --network throttled for an emulated link.")
    latency = config.latency if config.latency and config.kernel_latency else "0s"
    with Network(config.workers, config.bandwidth, latency=latency) as network:
        yield network


@contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """A bar per run."""
    columns = (
        TextColumn("{task.description:<28.28}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def make_runs(configs: list[Config], network: Network | None, progress: Progress) -> None:
    """Starts workers that make these runs one after the other, shows how far they are, and leaves none behind."""
    files = {Path(config.file): add_bar(config.spec, config.seed, progress) for config in configs}
    for file in files:
        file.unlink(missing_ok=True)  # interrupted: run again
    with tempfile.TemporaryDirectory(prefix="tersegrad-logs-") as folder, _termination_as_interrupt():
        workers = _launch(configs, network, Path(folder))
        try:
            while any(worker.poll() is None for worker in workers):
                for file, bar in files.items():
                    show(file, bar, progress)
                if any(worker.poll() for worker in workers):
                    _end(workers, _GRACE)  # the others end by themselves, or are killed
                time.sleep(_POLL)
        finally:
            _end(workers, 0.0)
        codes = [worker.returncode for worker in workers]
        for config, (file, bar) in zip(configs, files.items(), strict=True):
            show(file, bar, progress)
            if not is_finished(file) or any(codes):
                raise RunFailedError(_last_words(config, codes, Path(folder)))


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, so that no worker is left behind. Workers are not in our process group."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_finished(file: Path) -> bool:
    """Whether a run is finished."""
    events = read_events(file)
    return bool(events) and events[-1]["event"] == "end"


def add_bar(spec: str, seed: int, progress: Progress) -> TaskID:
    """A bar for one run."""
    label = spec if seed == 0 else f"{spec} seed {seed}"
    return progress.add_task(label, total=None, start=False, note="waiting")


def show(file: Path, task: TaskID, progress: Progress) -> None:
    """How far a run is, by its file."""
    events = read_events(file)
    if not events or progress.tasks[task].finished:
        return
    progress.start_task(task)
    note = ""
    scores = [event["score"] for event in events if event["event"] in ("eval", "end") and event["score"] is not None]
    if scores:
        metric = events[0]["metric"]
        note = f"{metric} {scores[-1]:.1%}" if metric == "accuracy" else f"{metric} {scores[-1]:.4g}"
    steps = [event for event in events if event["event"] != "start"]
    done = steps[-1]["step"] if steps else 0
    if done:
        took = steps[-1].get("wall", steps[-1]["seconds"])  # of a simulated run
        note = f"{1e3 * took / done:.0f} ms/step  {note}"
    total = done if events[-1]["event"] == "end" else events[0]["steps"]
    progress.update(task, total=total, completed=done, note=note)


def _launch(configs: list[Config], network: Network | None, logs: Path) -> list[subprocess.Popen[bytes]]:
    """torchrun on this machine; or one worker in each namespace, with the environment that torchrun would give."""
    module, workers = ["-m", "tersegrad.lab.worker"], configs[0].workers
    if network is None:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        return [_start([*argv, *module, json.dumps([asdict(c) for c in configs])], logs / "all.log", {})]
    started = []
    for rank in range(workers):
        mine = json.dumps([asdict(replace(c, interface=network.interface(rank))) for c in configs])
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(workers),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": "29500",  # the namespaces are ours alone: no port is taken
            "GLOO_SOCKET_IFNAME": network.interface(rank),
            "OMP_NUM_THREADS": "1",
        }
        argv = network.command(rank, [sys.executable, *module, mine])
        started.append(_start(argv, logs / f"rank{rank}.log", environment))
    return started


def _start(argv: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            argv, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True
        )


def _end(workers: list[subprocess.Popen[bytes]], grace: float) -> None:
    """Waits a little, then asks, then forces; each worker is the leader of its own process group."""
    for signum, patience in ((None, grace), (signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        alive = [worker for worker in workers if worker.poll() is None]
        for worker in alive:
            if signum is not None:
                os.killpg(worker.pid, signum)
        deadline = time.monotonic() + patience
        for worker in alive:
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def _last_words(config: Config, codes: list[int], logs: Path) -> str:
    """The end of the log of the worker that failed first, as far as exit codes tell."""
    telling = [(rank, code) for rank, code in enumerate(codes) if code > 0] or list(enumerate(codes))
    rank, code = telling[0]
    log = sorted(logs.iterdir())[rank if len(codes) > 1 else 0]
    tail = _telling_lines(log.read_text(errors="replace").splitlines())
    who = f"worker {rank}" if len(codes) > 1 else "torchrun"
    return (
        f"{config.spec}: {who} ended with exit code {code}. "
        f"Finished runs are kept; the same command goes on from here.\n{tail}"
    )


def _telling_lines(lines: list[str], most: int = 30) -> str:
    """The first traceback, which tells more than what torchrun says after it; else the end."""
    first = next((i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line), None)
    if first is None:
        return "\n".join(lines[-most:])
    last = next((i for i, line in enumerate(lines) if i > first and "Traceback" in line), len(lines))
    return "\n".join(lines[max(first, last - most) : last])


def command_line() -> str:
    """What the user typed, to be kept with the results."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
