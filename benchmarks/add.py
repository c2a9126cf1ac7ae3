"""residual + gradient, then exact top-k of it: ``torch.add``, a streamed sum, and both in one pass; also beside others.

    python benchmarks/add.py [--processes 1 4] [--rounds 41] [--json FILE]

With several processes each does the same on vectors of its own, as workers that share a machine do; shown is the first.
All contestants take turns within each round.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch

from tersegrad.kernels import cpu, reference
from tersegrad.kernels.cpu.add import stream_scaled
from tersegrad.kernels.cpu.topk_of_sum import add_top_k_streamed
from tersegrad.kernels.ops import top_k_capacity
from tersegrad.lab.timing import Times, environment, interleave, write_rows

LENGTHS = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 6_553_600, 25_000_000)  # 6.5 M is DDP's bucket of 25 MB
RATIO = 0.01


def contestants(numel: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(numel, generator=generator) for _ in range(2))
    total, k = torch.empty(numel), max(1, round(RATIO * numel))
    chosen = torch.empty(k, dtype=torch.int32)
    candidates = torch.empty(top_k_capacity(numel, k), dtype=torch.int32)

    def in_two(add: Callable[..., None]) -> Callable[[], object]:
        return lambda: (add(a, b, 1.0, total), cpu.top_k(total, k, chosen, candidates))

    return {
        "torch.add": lambda: torch.add(a, b, out=total),
        "streamed": lambda: stream_scaled(a, b, 1.0, total),
        "torch.add, top-k": in_two(reference.add_scaled),
        "streamed, top-k": in_two(stream_scaled),
        "in one pass": lambda: add_top_k_streamed(a, b, k, total, chosen, candidates),
    }


def measure(rounds: int) -> dict[int, dict[str, Times]]:
    torch.set_num_threads(1)
    return {numel: interleave(contestants(numel), rounds) for numel in LENGTHS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 4], help="at the same time")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    args = parser.parse_args()
    rows = []
    for processes in args.processes:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            measured = pool.map(measure, [args.rounds] * processes, chunksize=1)[0]
        print(f"{processes} at a time, one thread each; ms, median [20 %, 80 %]")
        for numel, times in measured.items():
            cells = ", ".join(f"{name} {t}" for name, t in times.items())
            gain = times["torch.add, top-k"].median / times["in one pass"].median
            print(f"  {numel:>10} floats: {cells}: {gain:.2f}x faster")
            for what, of in times.items():
                about = {"what": what, "numel": numel, "processes": processes}
                rows += [{**about, "round": i, "ms": ms} for i, ms in enumerate(of.rounds)]
    if args.json:
        write_rows(args.json, ({**row, **environment()} for row in rows))


if __name__ == "__main__":
    main()
