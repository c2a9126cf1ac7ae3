"""Several methods in the same processes of the lab's network: they take turns, a block of steps each.

So a slow minute of the machine is slow for all of them, and a ratio within a round means something. Runs one after the
other differed by 30 % for the same method.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tersegrad.comm.throttled import Throttled
from tersegrad.lab import workloads
from tersegrad.lab.methods import Method
from tersegrad.lab.network import Network
from tersegrad.lab.train import Plan, open_network
from tersegrad.lab.worker import Config

SKIP = 1  # first step of a block, in which caches still hold another model
MAIN = ("forward", "backward", "update")  # parts of a step on the thread that trains
WORKER = ("encode", "wait", "decode")  # beside backward, on the worker's

# Milliseconds of a step by part: "step" is the whole, "cpu" what the processors spent, "kernel" what of that was Linux.
Block = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What all benchmarks of this kind are told."""
    parser.add_argument("--network", default="auto")
    parser.add_argument("--batch", type=int, help="per worker (default: the workload's)")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="DDP's bucket_cap_mb")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", type=Path)


def run(file: str, args: argparse.Namespace, workers: int, bandwidth: str | None, about: dict[str, Any]) -> None:
    """``file`` as workers in the lab's network, with ``about`` and what ``Contender`` needs as their one argument."""
    plan = Plan(
        specs=tuple(args.specs),
        workload=args.workload,
        workers=workers,
        network=args.network,
        bandwidth=bandwidth,
        latency=None,
        seeds=(0,),
        epochs=None,
        steps=1,
        seconds=None,
        data=args.data,
        out=Path(),
        command=Path(file).name,
        batch=args.batch,
    )
    config = plan.configs()[0]
    with open_network(config) as network:
        told = _told(config) | {"bucket_mb": args.bucket_mb} | about
        _launch(file, json.dumps(told), workers, network)


def _told(config: Config) -> dict[str, Any]:
    emulated = config.bandwidth if config.network == "throttled" else None
    return {"workload": config.workload, "batch": config.batch, "data": config.data, "bandwidth": emulated}


def _launch(file: str, about: str, workers: int, network: Network | None) -> None:
    """Under torchrun, or one worker in each namespace."""
    worker = [str(Path(file).resolve()), "--worker", about]
    if network is None:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        subprocess.run([*argv, *worker], check=True)
        return
    started = []
    for rank in range(workers):
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": network.interface(rank),
            "OMP_NUM_THREADS": "1",
        }
        argv = network.command(rank, [sys.executable, *worker])
        started.append(subprocess.Popen(argv, env={**os.environ, **environ}))
    codes = [process.wait() for process in started]
    if any(codes):
        raise RuntimeError("a worker failed in its namespace; its words are above.")


# ---- in a worker ---------------------------------------------------------------------------------


def begin() -> None:
    """One thread, and a process group."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # channels last; DDP says so once a model
    dist.init_process_group("gloo")


def end(contenders: dict[str, "Contender"]) -> None:
    """All leave together."""
    for contender in contenders.values():
        if contender.handle is not None:
            contender.handle.close()
    dist.barrier()
    dist.destroy_process_group()


def workload_of(about: dict[str, Any]) -> workloads.Workload:
    """With the batch that was asked for."""
    workload = workloads.find(about["workload"])
    return workload if about["batch"] is None else replace(workload, batch=about["batch"])


def emulated(about: dict[str, Any]) -> Throttled | None:
    """The slow link, where the kernel does not make one."""
    return Throttled(about["bandwidth"]) if about["bandwidth"] else None


def take_turns(contenders: dict[str, "Contender"], rounds: int, steps: int, seconds: float) -> dict[str, list[Block]]:
    """One block each, round after round; every round begins with another of them."""
    blocks: dict[str, list[Block]] = {spec: [] for spec in contenders}
    order = list(contenders)
    for turn in range(rounds):
        for spec in order[turn % len(order) :] + order[: turn % len(order)]:
            blocks[spec].append(contenders[spec].block(steps, seconds))
    return blocks


class Contender:
    """One spec, with a model of its own."""

    def __init__(self, about: dict[str, Any], spec: str):
        method = Method(spec).settled()  # blocks of a few steps would show its beginning alone
        self.workload = method.adapt(workload_of(about))
        self.data = self.workload.load(Path(about["data"]) if about["data"] else None)
        # All ranks build the same model; sending 66 M parameters to three others would take a minute of such a link.
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": about["bucket_mb"], "init_sync": False}
        options |= method.ddp_options()
        self.model = DistributedDataParallel(self.workload.model(0), **options)
        self.optimizer = self.workload.optimizer(self.model)
        self.handle = method.install(self.model, self.optimizer, emulated(about), timeout=300.0)
        self.batches = self._batches()
        self.state: Any = None
        self.spent = dict.fromkeys(MAIN, 0.0)
        self.step_seconds = 0.0

    def _batches(self) -> Iterator[workloads.Batch]:
        epoch = 0
        while True:
            yield from self.workload.batches(self.data, epoch, dist.get_rank(), dist.get_world_size(), 0)
            epoch += 1

    def run(self, steps: int) -> Block:
        """Trains. The clock stops when all ranks are done: without a network, nobody waits before that."""
        dist.barrier()
        before = self._clocks()
        for place in range(steps):
            if place == SKIP:
                before = self._clocks()
            self._step()
        dist.barrier()
        after = self._clocks()
        self.step_seconds = (after["step"] - before["step"]) / (steps - SKIP)
        return {part: 1e3 * (after[part] - before[part]) / (steps - SKIP) for part in after}

    def _step(self) -> None:
        marks = [time.perf_counter()]
        self.optimizer.zero_grad()
        loss, self.state = self.workload.loss(self.model, next(self.batches), self.state)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.workload.clip(self.model)
        self.optimizer.step()
        marks.append(time.perf_counter())
        for place, part in enumerate(MAIN):
            self.spent[part] += marks[place + 1] - marks[place]

    def _clocks(self) -> dict[str, float]:
        """Seconds so far, by part."""
        kernel = resource.getrusage(resource.RUSAGE_SELF).ru_stime
        clocks = {"step": time.perf_counter(), "cpu": time.process_time(), "kernel": kernel, **self.spent}
        if self.handle is not None:
            metrics = self.handle.metrics(norms=False)
            clocks |= {part: metrics[f"{part}_seconds"] for part in WORKER}
        return clocks

    def block(self, steps: int, seconds: float) -> Block:
        """A block of so many steps, or so many seconds."""
        most = torch.tensor([int(seconds / self.step_seconds)])
        dist.broadcast(most, 0)  # all workers make the same steps
        return self.run(min(steps, max(SKIP + 1, int(most))))


# ---- figures -------------------------------------------------------------------------------------


def of(part: str, blocks: list[Block]) -> list[float]:
    """One part of all rounds' blocks."""
    return [block[part] for block in blocks]


def ratios(mine: list[float], others: list[float]) -> list[float]:
    """Round by round: what is slow for both cancels."""
    return [one / other for one, other in zip(mine, others, strict=True)]
