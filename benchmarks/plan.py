"""Predicted against measured: the planner's step times beside real training on slow links, and what Auto makes of it.

python benchmarks/plan.py [--bandwidths 10Mbit,100Mbit,1Gbit,none] [--workers 2,4] [--repeats 3] [--json FILE]

In every cell of the grid (link x workers) the probe measures the network, the codecs and backward with all workers at
once; the planner predicts each spec's step; the lab trains with each spec, and with Auto until its trials are long
over. Times are medians over the second half of a run; with --repeats all of that is done again in turn, and the median
over the repeats counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from tersegrad.comm import TorchComm
from tersegrad.core import Comm
from tersegrad.lab import workloads
from tersegrad.lab.network import Network
from tersegrad.lab.train import Plan, open_network, read_events, train
from tersegrad.lab.worker import Config
from tersegrad.plan import advice, probe
from tersegrad.plan.advice import Setting
from tersegrad.timing import environment, write_rows

SPECS = ("none", "bf16", "topk", "powersgd", "ErrorFeedback(TwoShot(TopK(ratio=0.01)))")  # what Auto() chooses from
AUTO = "Auto()"


def main() -> None:
    if "--worker" in sys.argv:
        work(json.loads(sys.argv[-1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidths", default="10Mbit,100Mbit,1Gbit,none", help="none: not limited")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--workload", default="fashion")
    parser.add_argument("--specs", nargs="+", default=list(SPECS))
    parser.add_argument("--steps", type=int, default=240, help="of every run: rank 0 writes as often in all of them")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a fixed spec ends sooner")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--network", default="auto")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, help="keep the runs here (default: nowhere)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tersegrad-plan-") as folder:
        out = args.out or Path(folder)
        rows = []
        for workers in map(int, args.workers.split(",")):
            for bandwidth in args.bandwidths.split(","):
                rows += cell(args, workers, None if bandwidth == "none" else bandwidth, out / f"{bandwidth}-{workers}")
    summarise(rows)
    if args.json is not None:
        write_rows(args.json, [{**row, **environment()} for row in rows])


def cell(args: argparse.Namespace, workers: int, bandwidth: str | None, out: Path) -> list[dict[str, Any]]:
    """One link and number of workers: what is predicted, what is measured."""
    common: dict[str, Any] = {
        "workload": args.workload,
        "workers": workers,
        "network": args.network,
        "bandwidth": bandwidth,
        "latency": None,
        "seeds": (0,),
        "epochs": None,
        "steps": args.steps,
        "data": args.data,
        "command": "benchmarks/plan.py",
        "evaluate": False,
    }
    plans = [
        plan
        for turn in range(args.repeats)
        for plan in (
            Plan(specs=tuple(args.specs), seconds=args.seconds, out=out / str(turn), **common),
            Plan(specs=(AUTO,), seconds=None, out=out / str(turn) / "auto", **common),
        )
    ]
    predicted = predict(plans[0].configs()[0], args.specs)
    times: dict[str, list[float]] = {}
    for plan in plans:
        train(plan, Console())
        for config in plan.configs():
            times.setdefault(config.spec, []).append(step_ms(config))
    about = {"workers": workers, "bandwidth": bandwidth, "workload": args.workload}
    rows = [
        {"spec": spec, "measured_ms": statistics.median(ms), "repeats_ms": ms, "predicted_ms": predicted.get(spec)}
        for spec, ms in times.items()
    ]
    rows = [about | row for row in rows]
    show(rows)
    return rows


def step_ms(config: Config) -> float:
    """The median step of the second half of a run."""
    steps = [event for event in read_events(Path(config.file)) if event["event"] == "step"]
    late = [step for step in steps if step["step"] >= steps[-1]["step"] / 2]
    return statistics.median(1e3 * (b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(late))


# ---- the probe, in the lab's network --------------------------------------------------------------


def predict(config: Config, specs: list[str]) -> dict[str, float]:
    """Milliseconds of a step by spec, out of a profile that is measured in the same network."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file, open_network(config) as network:
        about = {"workload": config.workload, "data": config.data, "specs": specs, "file": file.name}
        about |= {"bandwidth": config.bandwidth if config.network == "throttled" else None}
        launch(json.dumps(about), config.workers, network)
        profile = probe.Profile.load(Path(file.name))
    setting = Setting(profile.workers, profile.network, profile.compute, profile.contention)
    link = profile.network.all_reduce
    print(f"measured: {8e-6 * link.bandwidth:.4g} Mbit/s, {1e3 * link.latency:.3g} ms a hop, {link.busy:.0%} busy; "
          f"a step without communication {1e3 * profile.compute.seconds:.1f} ms")  # fmt: skip
    return {spec: 1e3 * advice.predict(spec, costs, setting).step for spec, costs in profile.costs.items()}


def launch(about: str, workers: int, network: Network | None) -> None:
    """This file as workers: under torchrun, or one in each namespace."""
    worker = [str(Path(__file__).resolve()), "--worker", about]
    if network is None:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        subprocess.run([*argv, *worker], check=True, stderr=subprocess.DEVNULL)
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
        raise RuntimeError("the probe failed in a namespace; its words are above.")


def work(about: dict[str, Any]) -> None:
    """One worker of the probe: the workload's own model, batch and optimizer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = workloads.find(about["workload"])
    data = workload.load(Path(about["data"]) if about["data"] else None)
    model = workload.model(0)
    optimizer = workload.optimizer(model)
    batch = next(iter(workload.batches(data, 0, dist.get_rank(), dist.get_world_size(), 0)))
    comm: Comm = TorchComm(dist.new_group())
    if about["bandwidth"]:
        from tersegrad.taps import Throttled

        comm = Throttled(about["bandwidth"])(comm)
    profile = probe.measure(
        comm,
        about["specs"],
        model,
        lambda: workload.loss(model, batch)[0],
        step=lambda: _update(workload, model, optimizer),
    )
    if dist.get_rank() == 0:
        profile.save(Path(about["file"]))
    dist.barrier()
    dist.destroy_process_group()


def _update(workload: workloads.Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    workload.clip(model)
    optimizer.step()


# ---- tables --------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]]) -> None:
    """One cell."""
    print(f"\n{rows[0]['workers']} workers, {rows[0]['bandwidth'] or 'not limited'}")
    for row in rows:
        guess = row["predicted_ms"]
        text = f", {guess:9.1f} predicted, off by {error(row):.0%}" if guess is not None else ""
        print(f"  {row['spec']:<42} {row['measured_ms']:9.1f} ms [{_spread(row['repeats_ms'])}]{text}")
    fixed = [row["measured_ms"] for row in rows if row["spec"] != AUTO]
    auto = next(row["measured_ms"] for row in rows if row["spec"] == AUTO)
    plain = next((row["measured_ms"] for row in rows if row["spec"] == "none"), None)
    against = "" if plain is None else f", {auto / plain:.2f} of plain DDP"
    print(f"  Auto takes {auto / min(fixed):.2f} of the best fixed spec{against}", flush=True)


def _spread(ms: list[float]) -> str:
    return f"{min(ms):.1f}, {max(ms):.1f}"


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
