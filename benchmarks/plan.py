"""Predicted against measured: the planner's step times beside real training on slow links, and what Auto makes of it.

python benchmarks/plan.py [--bandwidths 10Mbit,100Mbit,1Gbit,none] [--workers 2,4] [--rounds 7] [--json FILE]

In every cell of the grid (link x workers) the same processes do everything: the probe measures the network, the codecs
and backward, and the planner predicts each spec's step; then every spec trains a model of its own, and Auto makes its
choice; then all take turns, a block of steps each, round after round, so that a slow minute of the machine is slow for
all of them. Times are rank 0's, the median over the rounds counts, and ratios are medians of the rounds' own ratios.
"""

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tersegrad.comm import TorchComm
from tersegrad.core import Comm
from tersegrad.lab import workloads
from tersegrad.lab.methods import Method
from tersegrad.lab.network import Network
from tersegrad.lab.train import Plan, open_network
from tersegrad.plan import advice, probe
from tersegrad.plan.advice import Setting
from tersegrad.taps import Throttled
from tersegrad.timing import environment, write_rows

SPECS = ("none", "bf16", "topk", "powersgd", "ErrorFeedback(TwoShot(TopK(ratio=0.01)))")  # what Auto() chooses from
AUTO = "Auto()"
SETTLE = 6  # steps before the clock starts: DDP cuts its buckets anew in the first three
DECIDE = 150  # of Auto: its trials end after 104 or 129
SKIP = 2  # first steps of a block, in which caches still hold another model


def main() -> None:
    if "--worker" in sys.argv:
        work(json.loads(sys.argv[-1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidths", default="10Mbit,100Mbit,1Gbit,none", help="none: not limited")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--workload", default="fashion")
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of a block")
    parser.add_argument("--seconds", type=float, default=5.0, help="a block that would take longer has fewer steps")
    parser.add_argument("--network", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for workers in map(int, args.workers.split(",")):
        for bandwidth in args.bandwidths.split(","):
            rows += cell(args, workers, None if bandwidth == "none" else bandwidth)
            if args.json is not None:
                write_rows(args.json, [{**row, **environment()} for row in rows])  # so far: a grid takes its time
    summarise(rows)


def cell(args: argparse.Namespace, workers: int, bandwidth: str | None) -> list[dict[str, Any]]:
    """One link and number of workers: what is predicted, what is measured."""
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
        command="benchmarks/plan.py",
    )
    config = plan.configs()[0]
    print(f"\n{workers} workers, {bandwidth or 'not limited'}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tersegrad-plan-") as folder, open_network(config) as network:
        files = {"profile": f"{folder}/profile.json", "times": f"{folder}/times.json"}
        about = {"workload": config.workload, "data": config.data, "specs": args.specs, **files}
        about |= {"bandwidth": config.bandwidth if config.network == "throttled" else None}
        about |= {key: getattr(args, key) for key in ("rounds", "steps", "seconds")}
        launch(json.dumps(about), workers, network)
        predicted = predict(probe.Profile.load(Path(files["profile"])))
        times = json.loads(Path(files["times"]).read_text())
    about = {"workers": workers, "bandwidth": bandwidth, "workload": args.workload}
    rows = [
        {
            **about,
            "spec": spec,
            "measured_ms": statistics.median(ms),
            "rounds_ms": ms,
            "predicted_ms": predicted.get(spec),
        }
        for spec, ms in times.items()
    ]
    show(rows)
    return rows


def predict(profile: probe.Profile) -> dict[str, float]:
    """Milliseconds of a step by spec, out of a profile that was measured in the same network."""
    setting = Setting(profile.workers, profile.network, profile.compute, profile.contention)
    link = profile.network.all_reduce
    print(f"  measured: {8e-6 * link.bandwidth:.4g} Mbit/s, {1e3 * link.latency:.3g} ms a hop, {link.busy:.0%} busy; "
          f"a step without communication {1e3 * profile.compute.seconds:.1f} ms")  # fmt: skip
    return {spec: 1e3 * advice.predict(spec, costs, setting).step for spec, costs in profile.costs.items()}


# ---- the workers, in the lab's network ------------------------------------------------------------


def launch(about: str, workers: int, network: Network | None) -> None:
    """This file as workers: under torchrun, or one in each namespace."""
    worker = [str(Path(__file__).resolve()), "--worker", about]
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


def work(about: dict[str, Any]) -> None:
    """One worker: the probe, then all specs in turn, with the workload's own model, batch and optimizer."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # channels last; DDP says so once a model
    dist.init_process_group("gloo")
    leader = dist.get_rank() == 0
    logging.basicConfig(level=logging.INFO if leader else logging.WARNING, stream=sys.stdout, format="  %(message)s")
    profile = measure(about)
    if leader:
        profile.save(Path(about["profile"]))
    contenders = {spec: Contender(about, spec) for spec in (*about["specs"], AUTO)}
    for spec, contender in contenders.items():
        contender.run(DECIDE if spec == AUTO else SETTLE)
    times: dict[str, list[float]] = {spec: [] for spec in contenders}
    order = list(contenders)
    for turn in range(about["rounds"]):
        for spec in order[turn % len(order) :] + order[: turn % len(order)]:
            times[spec].append(contenders[spec].block(about["steps"], about["seconds"]))
    if leader:
        Path(about["times"]).write_text(json.dumps(times))
    for contender in contenders.values():
        if contender.handle is not None:
            contender.handle.close()
    dist.barrier()
    dist.destroy_process_group()


def measure(about: dict[str, Any]) -> probe.Profile:
    """What the planner is given."""
    workload = workloads.find(about["workload"])
    data = workload.load(Path(about["data"]) if about["data"] else None)
    model = workload.model(0)
    optimizer = workload.optimizer(model)
    batch = next(iter(workload.batches(data, 0, dist.get_rank(), dist.get_world_size(), 0)))
    comm: Comm = TorchComm(dist.new_group())
    if link := emulated(about):
        comm = link(comm)

    def update() -> None:
        workload.clip(model)
        optimizer.step()

    ours = [spec for spec in about["specs"] if not spec.startswith("torch:")]  # others are measured, not predicted
    return probe.measure(comm, ours, model, lambda: workload.loss(model, batch)[0], step=update)


def emulated(about: dict[str, Any]) -> Throttled | None:
    """The slow link, where the kernel does not make one."""
    return Throttled(about["bandwidth"]) if about["bandwidth"] else None


class Contender:
    """One spec, with a model of its own."""

    def __init__(self, about: dict[str, Any], spec: str):
        method = Method(spec)
        self.workload = method.adapt(workloads.find(about["workload"]))
        self.data = self.workload.load(Path(about["data"]) if about["data"] else None)
        self.model = DistributedDataParallel(self.workload.model(0), **method.ddp_options())
        self.optimizer = self.workload.optimizer(self.model)
        self.handle = method.install(self.model, self.optimizer, emulated(about), timeout=300.0)
        self.batches = self._batches()
        self.state: Any = None
        self.step_seconds = 0.0

    def _batches(self) -> Iterator[workloads.Batch]:
        epoch = 0
        while True:
            yield from self.workload.batches(self.data, epoch, dist.get_rank(), dist.get_world_size(), 0)
            epoch += 1

    def run(self, steps: int) -> None:
        """Trains, and keeps how long a step took."""
        dist.barrier()
        started = time.perf_counter()
        for place in range(steps):
            if place == SKIP:
                started = time.perf_counter()
            self.optimizer.zero_grad()
            loss, self.state = self.workload.loss(self.model, next(self.batches), self.state)
            loss.backward()
            self.workload.clip(self.model)
            self.optimizer.step()
        self.step_seconds = (time.perf_counter() - started) / (steps - SKIP)

    def block(self, steps: int, seconds: float) -> float:
        """Milliseconds of a step, in a block of so many steps or so many seconds."""
        most = torch.tensor([int(seconds / self.step_seconds)])
        dist.broadcast(most, 0)  # all workers make the same steps
        self.run(min(steps, max(SKIP + 2, int(most))))
        return 1e3 * self.step_seconds


# ---- tables --------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]]) -> None:
    """One cell."""
    for row in rows:
        guess = row["predicted_ms"]
        text = f", {guess:9.1f} predicted, off by {error(row):.0%}" if guess is not None else ""
        spread = f"{min(row['rounds_ms']):.1f}, {max(row['rounds_ms']):.1f}"
        print(f"  {row['spec']:<42} {row['measured_ms']:9.1f} ms [{spread}]{text}")
    fixed = {row["spec"]: row for row in rows if row["spec"] != AUTO}
    auto = next(row for row in rows if row["spec"] == AUTO)
    best = min(fixed.values(), key=lambda row: row["measured_ms"])
    against = f", {ratio(auto, fixed['none']):.2f} of plain DDP" if "none" in fixed else ""
    print(f"  Auto takes {ratio(auto, best):.2f} of the best fixed spec, {best['spec']}{against}", flush=True)


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The median of the rounds' ratios: what is slow for both cancels."""
    return statistics.median(a / b for a, b in zip(one["rounds_ms"], other["rounds_ms"], strict=True))


def error(row: dict[str, Any]) -> float:
    """Relative to what was measured."""
    return abs(row["predicted_ms"] - row["measured_ms"]) / row["measured_ms"]


def summarise(rows: list[dict[str, Any]]) -> None:
    """Over the grid."""
    known = [row for row in rows if row["predicted_ms"] is not None]
    print(f"\nmedian error of the prediction: {statistics.median(map(error, known)):.0%} over {len(known)} runs")
    for spec in dict.fromkeys(row["spec"] for row in known):
        print(f"  {spec:<42} {statistics.median(error(row) for row in known if row['spec'] == spec):.0%}")


if __name__ == "__main__":
    main()
