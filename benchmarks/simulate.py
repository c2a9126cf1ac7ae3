"""What a simulation costs: time beside plain passes, memory, time beside real processes, and predicted step times.

python benchmarks/simulate.py overhead [--workers 16] [--spec topk4] [--rounds 15]
python benchmarks/simulate.py memory [--workers 64] [--spec topk4]
python benchmarks/simulate.py wall --data DIR [--spec topk4]      (936 steps of Fashion-MNIST; needs a quiet machine)
python benchmarks/simulate.py predicted --data DIR                (each kind of exchange; needs namespaces)
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import tersegrad
from tersegrad.hosts.training import make
from tersegrad.lab import models
from tersegrad.lab.timing import environment, interleave, write_rows

PREDICTED = ("none", "bf16", "topk4", "ErrorFeedback(TwoShot(TopK(ratio=0.03)))", "Ring(BF16())", "powersgd", "signsgd")


def fashion_like(seed: int) -> tersegrad.Training:
    """The net of the fashion workload on random images, which take as long."""
    model = models.cnn()
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(32, 1, 28, 28, generator=draw), torch.randint(10, (32,), generator=draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return tersegrad.Training(model, optimizer, lambda *_: [(x, y)] * 1000, lambda m, b: cross_entropy(m(b[0]), b[1]))


def million(seed: int) -> tersegrad.Training:
    """1 M parameters."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 700), nn.ReLU(), nn.Linear(700, 10))
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 256, generator=draw), torch.randint(10, (8,), generator=draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return tersegrad.Training(model, optimizer, lambda *_: [(x, y)] * 1000, lambda m, b: cross_entropy(m(b[0]), b[1]))


def overhead(args: argparse.Namespace) -> list[dict[str, object]]:
    """A step of N virtual workers beside N plain forward and backward passes and one step of the optimizer."""
    torch.set_num_threads(args.threads)
    simulation = tersegrad.Simulation(make(fashion_like, seed=0), args.spec, args.workers)
    for _ in range(5):
        simulation.step()
    plain = make(fashion_like, seed=0)
    batch = next(iter(plain.batches(0, 1, 0)))

    def passes() -> None:
        for _ in range(args.workers):
            plain.optimizer.zero_grad()
            plain.loss(plain.model, batch).backward()
        plain.optimizer.step()

    times = interleave({"plain passes": passes, "simulation": simulation.step}, args.rounds)
    ratios = sorted(s / p for s, p in zip(times["simulation"].rounds, times["plain passes"].rounds, strict=True))
    middle = ratios[len(ratios) // 2]
    print(f"{args.workers} workers, {args.spec}, ms: " + ", ".join(f"{name} {t}" for name, t in times.items()))
    print(f"ratio {middle:.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]")
    about = {"workers": args.workers, "spec": args.spec, "ratio": middle, "low": ratios[0], "high": ratios[-1]}
    return [{"what": "overhead", **about, "environment": environment()}]


def memory(args: argparse.Namespace) -> list[dict[str, object]]:
    """Most memory that a simulation of a net of 1 M parameters has taken."""
    torch.set_num_threads(args.threads)
    training = make(million, seed=0)
    simulation = tersegrad.Simulation(training, args.spec, args.workers)
    started = time.perf_counter()
    for _ in range(12):
        simulation.step()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    parameters = sum(p.numel() for p in training.trained.values())
    print(f"{args.workers} workers of {parameters} parameters, {args.spec}: {most:.2f} GiB at most", end="")
    print(f", {(time.perf_counter() - started) / 12:.2f} s a step")
    return [{"what": "memory", "workers": args.workers, "spec": args.spec, "parameters": parameters, "gib": most}]


def wall(args: argparse.Namespace) -> list[dict[str, object]]:
    """936 steps of Fashion-MNIST with 4 workers: virtual ones, and the lab's real processes without a network."""
    common = ["--workload", "fashion", "--workers", "4", "--steps", "936", "--data", str(args.data)]
    seconds: dict[str, float] = {}
    for command, more in (("simulate", ["--eval-every", "468"]), ("train", ["--network", "none"])):
        with tempfile.TemporaryDirectory() as out:
            started = time.perf_counter()
            argv = [sys.executable, "-m", "tersegrad.cli", command, args.spec, *common, *more, "--out", out]
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            seconds[command] = time.perf_counter() - started
            ends = [json.loads(f.read_text().splitlines()[-1]) for f in Path(out).glob("*.jsonl")]
            print(f"{command}: {seconds[command]:.1f} s, accuracy {ends[0]['score']}", flush=True)
    print(f"ratio {seconds['simulate'] / seconds['train']:.3f}")
    return [{"what": "wall", "spec": args.spec, **seconds, "environment": environment()}]


def predicted(args: argparse.Namespace) -> list[dict[str, object]]:
    """The predicted step time of each kind of exchange beside the one that the lab measures over namespaces."""
    rows: list[dict[str, object]] = []
    link = ["--bandwidth", args.bandwidth]
    for spec in PREDICTED:
        with tempfile.TemporaryDirectory() as out:
            common = [
                spec,
                "--workload",
                "fashion",
                "--workers",
                "4",
                "--steps",
                str(args.steps),
                "--data",
                str(args.data),
            ]
            cli = [sys.executable, "-m", "tersegrad.cli"]
            real, virtual = Path(out, "real"), Path(out, "virtual")
            run = [*cli, "train", *common, *link, "--network", "netns", "--no-eval", "--out", str(real)]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
            lines = [json.loads(line) for line in next(real.glob("*.jsonl")).read_text().splitlines()]
            compute = f"{lines[0]['compute_ms']}ms"  # of all workers at once, as in training
            run = [*cli, "simulate", *common, *link, "--compute", compute, "--out", str(virtual)]
            subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
            end = json.loads(next(virtual.glob("*.jsonl")).read_text().splitlines()[-1])
        measured, said = (1e3 * line["seconds"] / line["step"] for line in (lines[-1], end))
        print(
            f"{spec:44} measured {measured:8.1f} ms, predicted {said:8.1f} ms, {said / measured - 1:+.0%}", flush=True
        )
        rows.append({"what": "predicted", "spec": spec, "measured_ms": measured, "predicted_ms": said})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("overhead", "memory", "wall", "predicted"))
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--spec", default="topk4")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bandwidth", default="100Mbit")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.workers = args.workers or {"memory": 64}.get(args.what, 16)
    rows = {"overhead": overhead, "memory": memory, "wall": wall, "predicted": predicted}[args.what](args)
    if args.json is not None:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
