"""The mean of several sparse vectors: zeros to which one after the other is added, and all in one pass.

    python benchmarks/scatter.py [--vectors 4] [--ratio 0.01] [--processes 1 4] [--rounds 41] [--json FILE]

With several processes each does the same on vectors of its own, as workers that share a machine do; shown is the first.
Both take turns within each round.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch

from tersegrad.kernels import cpu
from tersegrad.lab.timing import Times, environment, interleave, write_rows

LENGTHS = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 6_553_600, 25_000_000)  # 6.5 M is DDP's bucket of 25 MB
ONE_BY_ONE, TOGETHER = "one after the other", "together"


def contestants(numel: int, vectors: int, ratio: float) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    counts = [max(1, round(ratio * numel))] * vectors
    positions = [torch.randperm(numel, generator=generator)[:count].sort().values.int() for count in counts]
    indices, values, out = torch.cat(positions), torch.randn(sum(counts), generator=generator), torch.empty(numel)
    parts = list(zip(positions, values.split(counts), strict=True))

    def one_by_one() -> None:
        out.zero_()
        for position, value in parts:
            cpu.scatter_add(out, position, value, 1 / vectors)

    return {ONE_BY_ONE: one_by_one, TOGETHER: lambda: cpu.scatter_sum(indices, values, counts, 1 / vectors, out)}


def measure(rounds: int, vectors: int, ratio: float) -> dict[int, dict[str, Times]]:
    torch.set_num_threads(1)
    return {numel: interleave(contestants(numel, vectors, ratio), rounds) for numel in LENGTHS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vectors", type=int, default=4, help="workers whose payloads are summed")
    parser.add_argument("--ratio", type=float, default=0.01, help="of the elements, in each")
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 4], help="at the same time")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    args = parser.parse_args()
    rows = []
    for processes in args.processes:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            measured = pool.starmap(measure, [(args.rounds, args.vectors, args.ratio)] * processes, chunksize=1)[0]
        print(f"{args.vectors} vectors of {args.ratio:.1%}, {processes} at a time; ms, median [20 %, 80 %]")
        for numel, times in measured.items():
            gain = times[ONE_BY_ONE].median / times[TOGETHER].median
            print(f"  {numel:>10} floats: {', '.join(f'{name} {t}' for name, t in times.items())}: {gain:.2f}x faster")
            about = {"numel": numel, "vectors": args.vectors, "ratio": args.ratio, "processes": processes}
            rows += [{**about, "what": what, "ms": ms} for what, of in times.items() for ms in of.rounds]
    if args.json:
        write_rows(args.json, ({**row, **environment()} for row in rows))


if __name__ == "__main__":
    main()
