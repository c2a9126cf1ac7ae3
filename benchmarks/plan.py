"""Predicted against measured: the planner's step times beside real training on slow links, and what Auto makes of it.

python benchmarks/plan.py [--bandwidths 10Mbit,100Mbit,1Gbit,none] [--workers 2,4] [--rounds 7] [--json FILE]

In every cell of the grid (link x workers) the same processes do everything: the probe measures the network, the codecs
and backward, and the planner predicts each spec's step; then every spec trains a model of its own, and Auto makes its
choice; then all take turns, a block of steps each, round after round (``contenders.py``). Times are rank 0's, the
median over the rounds counts, and ratios are medians of the rounds' own ratios.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import contenders
from contenders import Contender
from tersegrad.comm.torch import TorchComm
from tersegrad.core import Comm
from tersegrad.lab.timing import environment, write_rows
from tersegrad.plan import advice, probe
from tersegrad.plan.advice import Setting

# what Auto() chooses from, without topk4's beginning: contenders and predictions leave that out
SPECS = ("none", "bf16", "topk4", "powersgd", "ErrorFeedback(TwoShot(TopK(ratio=0.03, values=RangeFloat(bits=4))))")
AUTO = "Auto()"
WARMUP = 6  # steps before the clock starts: DDP makes new buckets in the first three
DECIDE = 150  # of Auto: its trials end after 104 or 129


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
    contenders.add_arguments(parser)
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
    print(f"\n{workers} workers, {bandwidth or 'not limited'}", flush=True)
    with tempfile.TemporaryDirectory(prefix="tersegrad-plan-") as folder:
        told = {key: getattr(args, key) for key in ("specs", "rounds", "steps", "seconds")}
        told |= {"profile": f"{folder}/profile.json", "times": f"{folder}/times.json"}
        contenders.run(__file__, args, workers, bandwidth, told)
        predicted = predict(probe.Profile.load(Path(told["profile"])))
        times = json.loads(Path(told["times"]).read_text())
    about = {"workers": workers, "bandwidth": bandwidth, "workload": args.workload}
    rows = [
        {
            **about,
            "spec": spec,
            "measured_ms": statistics.median(contenders.of("step", blocks)),
            "rounds_ms": contenders.of("step", blocks),
            "predicted_ms": predicted.get(spec),
        }
        for spec, blocks in times.items()
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


def work(about: dict[str, Any]) -> None:
    """One worker: the probe, then all specs in turn, with the workload's own model, batch and optimizer."""
    contenders.begin()
    leader = dist.get_rank() == 0
    logging.basicConfig(level=logging.INFO if leader else logging.WARNING, stream=sys.stdout, format="  %(message)s")
    profile = measure(about)
    if leader:
        profile.save(Path(about["profile"]))
    racing = {spec: Contender(about, spec) for spec in (*about["specs"], AUTO)}
    for spec, contender in racing.items():
        contender.run(DECIDE if spec == AUTO else WARMUP)
    times = contenders.take_turns(racing, about["rounds"], about["steps"], about["seconds"])
    if leader:
        Path(about["times"]).write_text(json.dumps(times))
    contenders.end(racing)


def measure(about: dict[str, Any]) -> probe.Profile:
    """What the planner is given."""
    workload = contenders.workload_of(about)
    data = workload.load(Path(about["data"]) if about["data"] else None)
    model = workload.model(0)
    optimizer = workload.optimizer(model)
    batch = next(iter(workload.batches(data, 0, dist.get_rank(), dist.get_world_size(), 0)))
    comm: Comm = TorchComm(dist.new_group())
    if link := contenders.emulated(about):
        comm = link(comm)

    def update() -> None:
        workload.clip(model)
        optimizer.step()

    ours = [spec for spec in about["specs"] if not spec.startswith("torch:")]  # others are measured, not predicted
    return probe.measure(comm, ours, model, lambda: workload.loss(model, batch)[0], step=update)


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
    return statistics.median(contenders.ratios(one["rounds_ms"], other["rounds_ms"]))


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
