"""What the lab itself costs: a ``none`` run through it against the same steps in a script of one's own, in turns.

    python benchmarks/lab_overhead.py [--json FILE]

Both are started with torchrun, train the same network on the same batches, and take the time of every step. Also: how
long it takes from the command to the first step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from tersegrad.lab.timing import Times, environment, write_rows
from tersegrad.lab.train import read_events

BY_HAND = """
import json, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tersegrad.lab import workloads
torch.set_num_threads(1)
dist.init_process_group("gloo")
workload = workloads.find(sys.argv[1])
data = workload.load(None)
model = DistributedDataParallel(workload.model(0))
optimizer = workload.optimizer(model)
schedule = workload.schedule(optimizer, int(sys.argv[2]))
times = []
for batch in workload.batches(data, 0, dist.get_rank(), dist.get_world_size(), 0):
    started = time.perf_counter()
    optimizer.zero_grad()
    loss, _ = workload.loss(model, batch)
    loss.backward()
    optimizer.step()
    schedule.step()
    times.append(1e3 * (time.perf_counter() - started))
    if len(times) == int(sys.argv[2]):
        break
if dist.get_rank() == 0:
    print(json.dumps(times))
dist.destroy_process_group()
"""


def by_hand(args: argparse.Namespace, folder: Path) -> list[float]:
    script = folder / "by_hand.py"
    script.write_text(BY_HAND)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.workers}"]
    out = subprocess.run(
        [*argv, str(script), args.workload, str(args.steps)], capture_output=True, text=True, check=True
    )
    times: list[float] = json.loads(next(line for line in out.stdout.splitlines() if line.startswith("[")))
    return times


def by_lab(args: argparse.Namespace, folder: Path) -> tuple[list[float], float]:
    argv = [sys.executable, "-m", "tersegrad.cli", "train", "none", "--workload", args.workload, "--no-eval"]
    argv += ["--workers", str(args.workers), "--steps", str(args.steps), "--network", "none", "--out", str(folder)]
    started = time.time()
    subprocess.run(argv, capture_output=True, check=True)
    events = read_events(next(folder.glob("none*.jsonl")))
    steps = [event for event in events if event["event"] == "step"]
    startup = datetime.fromisoformat(events[0]["time"]).timestamp() - started
    return [1e3 * (b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(steps)], startup


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", default="fashion")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, startups = [], []
    for turn in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            hand = statistics.median(by_hand(args, Path(folder))[20:])
            steps, startup = by_lab(args, Path(folder))
            lab = statistics.median(steps[2:])
        startups.append(startup)
        rows += [
            {"what": what, "round": turn, "ms": ms, **environment()} for what, ms in (("hand", hand), ("lab", lab))
        ]
        print(f"round {turn}: by hand {hand:.2f} ms/step, lab {lab:.2f} ms/step", flush=True)
    hand, lab = (Times(tuple(row["ms"] for row in rows if row["what"] == what)) for what in ("hand", "lab"))
    print(f"by hand {hand} ms/step, lab {lab} ms/step: {lab.median / hand.median:.3f}x")
    print(f"from the command to the first step: {statistics.median(startups):.1f} s with {args.workers} workers")
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
