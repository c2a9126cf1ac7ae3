"""Where the milliseconds of a step go: forward, backward, update; and beside backward encode, wait, decode.

python benchmarks/step_profile.py [SPEC ...] [--workload cifar-vgg] [--batch 8] [--workers 4] [--bandwidth 100Mbit]
    [--steps 10] [--rounds 2] [--data DIR] [--json FILE]

All specs train in turn in the lab's network; the median of the second half of the steps counts, over all rounds.
``backward`` is the whole call, with what communication could not hide in it: "exposed" is what it takes longer than
without a network. "rest" is batches, the log and the loop itself. Encode, wait and decode are those of rank 0's
worker thread, which runs beside backward. "fixed" is what of encode and decode does not depend on the length, nearly
all of it Python: the same buckets with 8 to 64 floats in each tensor, one core, nothing else running.
"""

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tersegrad.core import Bucket
from tersegrad.lab import workloads
from tersegrad.lab.methods import Method
from tersegrad.lab.train import Plan, read_events, train
from tersegrad.lab.worker import Config
from tersegrad.plan import codecs, model
from tersegrad.plan.cost import payloads_decoded
from tersegrad.timing import environment, write_rows

NO_NETWORK = "torch:noop"
SPECS = (NO_NETWORK, "none", "topk", "sidco", "powersgd")
MAIN = ("forward", "backward", "update")
WORKER = ("encode", "wait", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=list(SPECS))
    parser.add_argument("--workload", default="cifar-vgg")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--bandwidth", default="100Mbit")
    parser.add_argument("--network", default="auto")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, help="keep the runs here (default: nowhere)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if NO_NETWORK not in args.specs:
        args.specs.insert(0, NO_NETWORK)
    with tempfile.TemporaryDirectory(prefix="tersegrad-profile-") as folder:
        plan = Plan(
            specs=tuple(args.specs),
            workload=args.workload,
            workers=args.workers,
            network=args.network,
            bandwidth=args.bandwidth,
            latency=None,
            seeds=tuple(range(args.rounds)),
            epochs=None,
            steps=args.steps,
            seconds=None,
            data=args.data,
            out=args.out or Path(folder),
            command=" ".join(sys.argv),
            evaluate=False,
            batch=args.batch,
        )
        train(plan, Console())
        rows = profile(plan.configs(), args.workload, args.workers)
    show(rows)
    if args.json is not None:
        about = {key: getattr(args, key) for key in ("workload", "batch", "workers", "bandwidth", "steps", "rounds")}
        write_rows(args.json, [{**about, **row, **environment()} for row in rows])


def profile(configs: list[Config], workload: str, workers: int) -> list[dict[str, Any]]:
    """One row a spec: milliseconds of a step by part."""
    steps: dict[str, list[dict[str, float]]] = {}
    for config in configs:
        steps.setdefault(config.spec, []).extend(late_steps(config))
    silent = statistics.median(step["backward"] for step in steps[NO_NETWORK])
    rows = []
    for spec, taken in steps.items():
        row: dict[str, Any] = {"spec": spec} | {
            part: statistics.median(step[part] for step in taken) for part in taken[0]
        }
        row |= {"least": min(step["step"] for step in taken), "most": max(step["step"] for step in taken)}
        rows.append(row | {"exposed": row["backward"] - silent, "fixed": fixed_ms(spec, workload, workers)})
    return rows


def late_steps(config: Config) -> list[dict[str, float]]:
    """Milliseconds of the steps in the second half of a run, by part."""
    logged = [event for event in read_events(Path(config.file)) if event["event"] == "step"]
    late = [event for event in logged if event["step"] >= logged[-1]["step"] / 2]
    steps = []
    for before, after in pairwise(late):
        each = 1e3 / (after["step"] - before["step"])
        parts = {part: each * (after[part] - before[part]) for part in (*MAIN, *WORKER) if after[part] is not None}
        step = each * (after["seconds"] - before["seconds"])
        steps.append({"step": step, **parts, "rest": step - sum(parts[part] for part in MAIN)})
    return steps


def fixed_ms(spec: str, workload: str, workers: int) -> float | None:
    """Encode and decode of the workload's buckets with next to nothing in them; None for what is not ours."""
    reducer = Method(spec).reducer()
    if reducer is None:
        return None
    torch.set_num_threads(1)
    decoded = payloads_decoded(codecs.exchange_of(reducer), workers)
    total = 0.0
    for bucket in model.buckets_of(workloads.find(workload).model(0)):
        tiny = Bucket(bucket.names, tuple((8, 8) if len(shape) > 1 else (8,) for shape in bucket.shapes))
        cost = codecs.measure(reducer, tiny, torch.randn(tiny.numel))
        total += cost.encode + decoded * cost.decode
    return 1e3 * total


def show(rows: list[dict[str, Any]]) -> None:
    """A table in milliseconds."""
    parts = ("step", *MAIN, "rest", "exposed", *WORKER, "fixed")
    print(f"\n{'':44}" + "".join(f"{part:>10}" for part in parts) + "   least, most")
    for row in rows:
        cells = "".join(f"{'-':>10}" if row.get(part) is None else f"{row[part]:10.1f}" for part in parts)
        print(f"{row['spec']:<44}{cells}   {row['least']:.0f}, {row['most']:.0f}")


if __name__ == "__main__":
    main()
