"""GradiVeQ over a whole cycle, learning, fits and bases counted, between network namespaces at 100 Mbit/s.

    python benchmarks/gradiveq_cycle.py resnet32 [--json FILE]
    python benchmarks/gradiveq_cycle.py vgg16 --compressed 20 [--json FILE]

Four workers, each in a namespace of its own, whose links the kernel limits (needs root or user namespaces). Gradients
are made between the steps: each layer's slices lie near K / 8 random directions, so that with ``loss=0.1`` learning
finds K / d of about 8. Every learning step of a cycle is made and timed, with the fits; of the compressed ones as many
as asked for, and their mean stands for the others. An uncompressed all-reduce is timed before and after.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradiveq import resnet32, vgg
from tersegrad import parse
from tersegrad.comm.metered import Metered
from tersegrad.comm.torch import TorchComm
from tersegrad.core import Comm, Layout, Reducer, Step, reduce
from tersegrad.core import state as states
from tersegrad.lab.network import Network
from tersegrad.lab.timing import environment, write_rows
from tersegrad.reducers import Dense, GradiVeQ

MODELS = {"resnet32": resnet32, "vgg16": vgg}
FILTER = "GradiVeQ(learn=30, compress=120, warmup=0, order='filter', learning=TwoShot(QSGD(bits=4)), linear=True, {})"
BYTES, DENSE, RING = (
    FILTER.format(f"coefficients={c}") for c in ("TwoShot(QSGD(bits=8))", "Dense()", "Ring(Identity())")
)
PAPER = "GradiVeQ(slice_size=4096, loss=0.01, warmup=0, learning=Ring(QSGD(bits=4)), rule='paper')"
METHODS = {"resnet32": [BYTES, DENSE, RING, PAPER], "vgg16": [BYTES]}
WORKERS, LINK, RATIO = 4, "100Mbit", 8


def gradients(reducer: GradiVeQ, layout: Layout, rank: int) -> Callable[[], Tensor]:
    """Makes gradients whose slices lie near K / 8 directions, the same ones on all workers."""
    fixed, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    spans = []
    for shape in layout.shapes:
        split = reducer.slicing(shape)
        rows = 0 if split is None else max(1, split.length // RATIO)
        spans.append((split, torch.randn(rows, split.length if split else 0, generator=fixed)))

    def gradient() -> Tensor:
        x = torch.randn(layout.numel, generator=own).mul_(0.1)
        for (split, directions), part in zip(spans, x.split(layout.sizes), strict=True):
            if split is not None:
                slices = torch.randn(split.count, len(directions), generator=own) @ directions
                split.join(slices.div_(len(directions) ** 0.5), part.clone(), part)
        return x

    return gradient


def timed(reducer: Reducer, layout: Layout, x: Tensor, state: dict[str, Any], comm: Comm) -> tuple[float, int]:
    """Milliseconds of one step, which all workers start together, and bytes sent."""
    metered = Metered(comm)
    comm.all_reduce(torch.zeros(1))
    started = time.perf_counter()
    reduce(reducer, Step(layout), x, x, state, metered)
    comm.all_reduce(torch.zeros(1))  # the slowest worker counts
    states.commit(state)
    return 1e3 * (time.perf_counter() - started), metered.total.sent


def cycle(name: str, layout: Layout, comm: Comm, compressed: int) -> dict[str, Any]:
    """All learning steps of a cycle with the fits, and some compressed steps."""
    reducer = parse(name)
    assert isinstance(reducer, GradiVeQ)
    state, gradient = reducer.init(layout, comm), gradients(reducer, layout, comm.rank)
    seen: dict[str, list[tuple[float, int]]] = {"learn": [], "compress": []}
    while len(seen["compress"]) < compressed:
        phase = "learn" if any(m["phase"] == "learn" for m in state["layers"].values()) else "compress"
        seen[phase].append(timed(reducer, layout, gradient(), state, comm))
    reports = [m["report"] for m in state["layers"].values()]
    coded = [r for r in reports if not r["refusals"]]
    sent = sum(r["slices"] * r["coefficients"] for r in coded)
    row = {
        "method": repr(reducer),
        "learning_steps": len(seen["learn"]),
        "compressed_steps": reducer.compress,
        "ratio": sum(r["slices"] * r["slice_length"] for r in coded) / sent,
        "fit_seconds": sum(r["fit_seconds"] for r in reports),
    }
    for phase, pairs in seen.items():
        row[f"{phase}_ms"] = [ms for ms, _ in pairs]
        row[f"{phase}_sent"] = statistics.mean(sent for _, sent in pairs)
    row["cycle_ms"] = sum(row["learn_ms"]) + statistics.mean(row["compress_ms"]) * reducer.compress
    row["cycle_sent"] = row["learn_sent"] * len(seen["learn"]) + row["compress_sent"] * reducer.compress
    return row


def dense(layout: Layout, comm: Comm, steps: int) -> list[tuple[float, int]]:
    """Plain steps."""
    return [timed(Dense(), layout, torch.randn(layout.numel), {}, comm) for _ in range(steps)]


def work(args: argparse.Namespace) -> None:
    """One worker; rank 0 writes what it saw."""
    dist.init_process_group("gloo")
    comm, layout = TorchComm(dist.group.WORLD), MODELS[args.model]()
    rows: list[dict[str, Any]] = []
    for name in args.methods or METHODS[args.model]:
        plain = dense(layout, comm, args.dense)
        row = cycle(name, layout, comm, args.compressed)
        plain += dense(layout, comm, args.dense)
        row |= {"model": args.model, "numel": layout.numel, "workers": comm.size, "link": LINK}
        row |= {"dense_ms": [ms for ms, _ in plain], "dense_sent": plain[0][1]}
        rows.append({**row, **environment()})
        if comm.rank == 0:
            show(row)
    if comm.rank == 0 and args.json:
        write_rows(args.json, rows)
    dist.barrier()
    dist.destroy_process_group()


def show(row: dict[str, Any]) -> None:
    """A line for each method."""
    steps = row["learning_steps"] + row["compressed_steps"]
    plain, learn = statistics.median(row["dense_ms"]), row["learn_ms"]
    print(
        f"{row['model']}, {row['method']}: K/d {row['ratio']:.1f}; dense {plain:.1f} ms a step; "
        f"{len(learn)} learning {statistics.median(learn):.1f} ms (all {sum(learn):.0f}, "
        f"fits {row['fit_seconds']:.2f} s), {row['compressed_steps']} compressed "
        f"{statistics.median(row['compress_ms']):.1f} ms; over the cycle {plain * steps / row['cycle_ms']:.2f}x less "
        f"time, {row['dense_sent'] * steps / row['cycle_sent']:.2f}x fewer bytes",
        flush=True,
    )


def launch(arguments: list[str]) -> None:
    """Starts the workers, each in its namespace, and waits for them."""
    with Network(WORKERS, LINK) as network, tempfile.TemporaryFile() as log:
        started = []
        for rank in range(WORKERS):
            known = {
                "RANK": str(rank),
                "WORLD_SIZE": str(WORKERS),
                "MASTER_ADDR": network.address(0),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": network.interface(rank),
                "OMP_NUM_THREADS": "1",
            }
            argv = network.command(rank, [sys.executable, __file__, *arguments])
            out = None if rank == 0 else log
            started.append(subprocess.Popen(argv, env={**os.environ, **known}, stdout=out, stderr=out))
        codes = [worker.wait() for worker in started]
    if any(codes):
        raise SystemExit(f"workers ended with {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--methods", nargs="+", help="specs without a warm-up (default: see the file)")
    parser.add_argument("--compressed", type=int, default=60, help="compressed steps that are timed")
    parser.add_argument("--dense", type=int, default=5, help="plain steps before each method, and as many after it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        work(args)
    else:
        launch(sys.argv[1:])


if __name__ == "__main__":
    main()
