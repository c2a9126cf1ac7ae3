"""One worker of a training run; started by ``torchrun`` or, in a network namespace, with the same environment by hand.

Rank 0 writes the run's file: one JSON line for the start, for every few steps, for every evaluation, and for the end.
"""

import copy
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad.comm.throttled import Throttled
from tersegrad.comm.traffic import all_reduce_traffic
from tersegrad.hosts.handle import Handle
from tersegrad.lab import workloads
from tersegrad.lab.methods import Method
from tersegrad.lab.timing import environment
from tersegrad.lab.workloads import Workload
from tersegrad.specs import load_module

COMPUTE_STEPS = 6  # steps without communication that are timed before training begins, at least
COMPUTE_MS = 1000  # and for how long, at least: in a tenth of that one worker can be done before the others have begun


@dataclass(frozen=True)
class Config:
    """The complete description of one run."""

    spec: str
    workload: str
    workers: int
    network: str  # "none", "throttled" or "netns"
    bandwidth: str | None
    latency: str | None
    seed: int
    epochs: int | None  # exactly one of these three sets the length of the run
    steps: int | None
    seconds: float | None
    data: str | None
    file: str
    command: str
    threads: int = 1  # of each worker
    timeout: float = 300.0
    evaluate: bool = True  # False where only time is of interest
    eval_every: int | None = None  # evaluate every so many steps too, not only after an epoch
    interface: str | None = None  # whose bytes the kernel counts, in a namespace
    batch: int | None = None  # per worker; None: the workload's own
    learning_rate: float | None = None  # the highest of the run; None: the workload's own
    bucket_cap_mb: int | None = None  # of DDP
    modules: tuple[str, ...] = ()  # where methods come from that are not tersegrad's
    kernel_latency: bool = False  # the kernel itself delays packets (netem), so nothing is emulated in a namespace
    identity: dict[str, Any] | None = None  # everything that decides the result

    @property
    def planned_epochs(self) -> int | None:
        """Passes over the data, at most; None where the number of steps says how long."""
        return None if self.steps else self.epochs or workloads.find(self.workload).epochs

    @property
    def link(self) -> Throttled | None:
        """The emulated part of the link: all of it, or the latency that the kernel cannot make."""
        if self.network == "throttled":
            return Throttled(self.bandwidth, latency=self.latency or "0s")
        if self.network == "netns" and self.latency and not self.kernel_latency:
            return Throttled(None, latency=self.latency)
        return None


def main() -> None:
    """Trains as the one argument says: a list of Configs in JSON, one run after the other."""
    configs = [Config(**raw) for raw in json.loads(sys.argv[1])]
    torch.set_num_threads(configs[0].threads)
    for module in configs[0].modules:
        load_module(module)
    dist.init_process_group("gloo", timeout=timedelta(seconds=configs[0].timeout))
    try:
        for config in configs:
            Trainer(config).run()
        leave_together()
    finally:
        dist.destroy_process_group()


def leave_together() -> None:
    """Wait until all workers are done: gloo aborts a process whose peer has gone.

    A barrier over gloo is not enough, since its last message may still be under way to the others; so all say through
    the store that they have passed it. The rank that may hold the store leaves last.
    """
    dist.barrier()
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    store.set(f"passed/{rank}", "")
    store.wait([f"passed/{other}" for other in range(size)])
    store.set(f"left/{rank}", "")
    if rank == 0:
        store.wait([f"left/{other}" for other in range(size)])


class Trainer:
    """The training loop, the same for every workload and method."""

    def __init__(self, config: Config):
        self.config = config
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        own = {key: getattr(config, key) for key in ("batch", "learning_rate") if getattr(config, key) is not None}
        self.workload: Workload = replace(workloads.find(config.workload), **own)
        self.data = self.workload.load(Path(config.data) if config.data else None)
        module = self.workload.model(config.seed)
        self.parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self.compute_ms = self._time_compute(module)
        method = Method(config.spec)
        self.workload = method.adapt(self.workload)
        options = {"bucket_cap_mb": config.bucket_cap_mb, **method.ddp_options()}
        self.model = DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
        self.optimizer = self.workload.optimizer(self.model)
        self.handle: Handle | None = method.install(self.model, self.optimizer, config.link, config.timeout)
        self.epoch_steps = self.workload.steps(self.data, self.size)
        self.planned = config.steps or (config.planned_epochs or 0) * self.epoch_steps
        self.schedule = self.workload.schedule(self.optimizer, self.planned)
        self.log_every = max(1, min(10, self.planned // 20))
        self.began, self.paused, self.done = 0.0, 0.0, 0
        self.evaluated = 0  # the step after which the last evaluation was made
        self.spent = dict.fromkeys(("forward", "backward", "update"), 0.0)
        self.sent_before = self._kernel_bytes()
        self.score: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since training began, without evaluations. Batches and the log count, or rank 0 would wait less."""
        return time.perf_counter() - self.began - self.paused

    def run(self) -> None:
        """Epochs until the steps or the time are used up."""
        out = open(self.config.file, "w") if self.rank == 0 else None  # noqa: SIM115  # closed below
        try:
            self._write(out, "start", **self._about())
            dist.barrier()
            self.began = time.perf_counter()
            epoch = 0
            while not self._over():
                self._epoch(epoch, out)
                epoch += 1
                self._evaluate(out)
            end = {"step": self.done, "seconds": self.seconds, "score": self.score, **self._sent()}
            decisions = [] if self.handle is None else self.handle.metrics(norms=False)["decisions"]
            self._write(out, "end", **end, **({"decisions": decisions} if decisions else {}))
        finally:
            if out is not None:
                out.close()
        if self.handle is not None:
            self.handle.close()

    def _epoch(self, epoch: int, out: TextIO | None) -> None:
        state = None
        for batch in self.workload.batches(self.data, epoch, self.rank, self.size, self.config.seed):
            if self._over():
                return
            marks = [time.perf_counter()]
            self.optimizer.zero_grad()
            loss, state = self.workload.loss(self.model, batch, state)
            marks.append(time.perf_counter())
            loss.backward()
            marks.append(time.perf_counter())
            self.workload.clip(self.model)
            self.optimizer.step()
            self.schedule.step()
            marks.append(time.perf_counter())
            for part, (before, after) in zip(self.spent, pairwise(marks), strict=True):
                self.spent[part] += after - before
            self.done += 1
            if self.done % self.log_every == 0:
                self._log(float(loss.detach()), out)
            if self.config.eval_every is not None and self.done % self.config.eval_every == 0:
                self._evaluate(out)

    def _over(self) -> bool:
        """All workers stop together: by steps, which all count alike, or when rank 0's clock says so."""
        if self.done >= self.planned:
            return True
        if self.config.seconds is None or self.done % self.log_every:
            return False
        verdict = torch.tensor([self.seconds >= self.config.seconds], dtype=torch.uint8)
        dist.broadcast(verdict, 0)
        return bool(verdict)

    def _evaluate(self, out: TextIO | None) -> None:
        """On rank 0, once after a step; the others wait. The clock stands still."""
        if not self.config.evaluate or self.evaluated == self.done:
            return
        self.evaluated = self.done
        seconds = self.seconds
        if self.rank == 0:
            self.score = self.workload.evaluate(self.model.module, self.data)
            epochs = self.done / self.epoch_steps
            about = {"step": self.done, "epoch": epochs, "seconds": seconds, "score": self.score}
            self._write(out, "eval", **about, **self._sent())
        dist.barrier()
        self.paused += self.seconds - seconds

    def _time_compute(self, module: nn.Module) -> float:
        """Milliseconds of one step with no communication at all, on a copy; all workers at once, as in training."""
        twin = copy.deepcopy(module)
        optimizer = self.workload.optimizer(twin)
        state, times = None, []
        dist.barrier()
        for batch in self.workload.batches(self.data, 0, self.rank, self.size, self.config.seed):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss, state = self.workload.loss(twin, batch, state)
            loss.backward()
            self.workload.clip(twin)
            optimizer.step()
            times.append(1e3 * (time.perf_counter() - started))
            if len(times) >= COMPUTE_STEPS and sum(times) >= COMPUTE_MS:
                break
        return sorted(times[1:] or times)[len(times[1:]) // 2]

    # ---- what is written --------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        config = asdict(self.config)
        link = ("bandwidth", "latency", "network", "kernel_latency")
        return {
            **{key: config[key] for key in ("spec", "workload", "workers", *link, "seed", "learning_rate")},
            "expression": Method(self.config.spec).expression,
            "metric": self.workload.metric,
            "parameters": self.parameters,
            "batch": self.workload.batch,
            "steps": self.planned,
            "epochs": self.config.planned_epochs,
            "limit_seconds": self.config.seconds,
            "compute_ms": self.compute_ms,
            "identity": self.config.identity,
            "command": self.config.command,
            "environment": {**environment(), "tersegrad": tersegrad.__version__},
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _log(self, loss: float, out: TextIO | None) -> None:
        if self.rank:
            return
        seconds, cpu = self.seconds, time.process_time()
        split: dict[str, Any] = dict.fromkeys(("encode", "wait", "decode", "density"))
        if self.handle is not None:
            metrics = self.handle.metrics(norms=False)
            split = {key: metrics[f"{key}_seconds"] for key in ("encode", "wait", "decode")}
            split["density"] = metrics["density"]
        times = {"seconds": seconds, "cpu": cpu, **self.spent, **split}
        self._write(out, "step", step=self.done, loss=loss, **self._sent(), **times)

    def _sent(self) -> dict[str, int | None]:
        """Bytes that left this worker: as the kernel counted them where it does, and by our own account."""
        accounted = self._accounted()
        kernel = self._kernel_bytes()
        return {"sent": accounted if kernel is None else kernel - (self.sent_before or 0), "accounted": accounted}

    def _accounted(self) -> int | None:
        """Our own count; None for torch's hooks, which keep none."""
        if self.handle is not None:
            sent: int = self.handle.metrics(norms=False)["bytes_sent"]
            return sent
        if self.config.spec == "none":
            return self.done * all_reduce_traffic(self.size, 4 * self.parameters).sent
        return None

    def _kernel_bytes(self) -> int | None:
        """Bytes that this namespace's interface has sent so far."""
        if self.config.interface is None:
            return None
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.config.interface:
                return int(numbers.split()[8])
        raise RuntimeError(f"there is no interface {self.config.interface} in this network namespace.")

    def _write(self, out: TextIO | None, event: str, **values: Any) -> None:
        if out is not None:
            out.write(json.dumps({"event": event, **values}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
