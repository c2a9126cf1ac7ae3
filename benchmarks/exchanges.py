"""Ways to exchange the same payloads, over an emulated link: bytes that leave a worker, and time of one step.

    torchrun --standalone --nproc-per-node 4 benchmarks/exchanges.py [--bandwidth 100Mbit] [--latency 0s] [--json FILE]
    python benchmarks/exchanges.py --workers 2 4 8

Started by torchrun the workers are processes, else threads. They share this machine's cores, so their computing adds up
where it would not on machines of their own; "waiting" is the part of a step that a worker spent in collectives. All
take turns in every round.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch

import workers
from tersegrad import Metered, Throttled
from tersegrad.comm.units import show_bytes
from tersegrad.core import Comm, Layout, Step, reduce
from tersegrad.core import state as states
from tersegrad.lab.timing import Times, environment, write_rows
from tersegrad.specs import parse_reducer

SPECS = (
    "Dense()",
    "AllReduce(BF16())",
    "Ring(BF16())",
    "TwoShot(BF16())",
    "AllGather(QSGD(bits=4))",
    "Ring(QSGD(bits=4), pieces=1)",
    "Ring(QSGD(bits=4), pieces=2)",
    "TwoShot(QSGD(bits=4))",
    "AllGather(TopK(0.01))",
    "Ring(TopK(0.01), pieces=1)",
    "Ring(TopK(0.01), pieces=2)",
    "TwoShot(TopK(0.01))",
    "PowerSGD(rank=2)",
)


class Contestant:
    """One reducer of one worker, with its own meter on the link that all of them share."""

    def __init__(self, text: str, layout: Layout, comm: Comm, link: Throttled):
        self.reducer, self.now, self.comm = parse_reducer(text), Step(layout), comm
        self.link = link
        self.state = self.reducer.init(layout, comm)
        self.ms: list[float] = []
        self.waiting: list[float] = []
        self.sent = 0

    def step(self, gradient: torch.Tensor) -> None:
        x = gradient.clone()
        meter = Metered(self.link(self.comm))
        self.comm.all_reduce(torch.zeros(1))  # all begin together
        began = time.perf_counter()
        reduce(self.reducer, self.now, x, x, self.state, meter)
        self.ms.append(1e3 * (time.perf_counter() - began))
        states.commit(self.state)
        self.waiting.append(1e3 * meter.total.seconds)
        self.sent = meter.total.sent


def run(size: int, numel: int, link: Throttled, rounds: int) -> dict[str, Contestant]:
    """The contestants of worker 0."""
    rows = numel // 1000

    def work(comm: Comm) -> dict[str, Contestant]:
        layout = Layout(("weight",), ((rows, 1000),))
        gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(comm.rank))
        contestants = {text: Contestant(text, layout, comm, link) for text in SPECS}
        for _ in range(rounds + 2):
            for contestant in contestants.values():
                contestant.step(gradient)
        return contestants

    return workers.run(size, work)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bandwidth", default="100Mbit")
    parser.add_argument("--latency", default="0s")
    parser.add_argument("--numel", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[int(os.environ.get("WORLD_SIZE", 4))])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    link = Throttled(args.bandwidth, latency=args.latency)
    rows: list[dict[str, Any]] = []
    for size in args.workers:
        print(f"\n{size} workers, {args.numel} elements, {args.bandwidth}, {args.latency} one way")
        for text, found in run(size, args.numel, link, args.rounds).items():
            ms, waiting = Times(tuple(found.ms[2:])), Times(tuple(found.waiting[2:]))
            print(
                f"{text:28} {show_bytes(found.sent):>8} sent  {ms!s:26} ms  waiting {waiting.median:7.1f}", flush=True
            )
            about = {"spec": text, "workers": size, "numel": args.numel, "sent": found.sent, "median_ms": ms.median}
            link_is = {"bandwidth": args.bandwidth, "latency": args.latency}
            rows.append({**about, "waiting_ms": waiting.median, **link_is, "rounds_ms": ms.rounds, **environment()})
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    workers.main(main)
