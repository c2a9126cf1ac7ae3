"""Exact top-k on one core: our kernel against ``torch.topk(x.abs(), k)`` and against copying the vector once.

    python benchmarks/topk.py [--json FILE]

All contestants take turns within each round, so that a noisy machine disturbs all of them alike.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tersegrad.kernels.cpu import all_finite, top_k
from tersegrad.kernels.ops import top_k_capacity
from tersegrad.lab.timing import environment, interleave, write_rows

RATIOS = (0.01, 0.001)


def gaussian(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, generator=generator)


def laplace(n: int, generator: torch.Generator) -> Tensor:
    signs = torch.rand(n, generator=generator) - 0.5
    return torch.empty(n).exponential_(generator=generator).copysign_(signs)


def layers(n: int, generator: torch.Generator) -> Tensor:
    """50 layers of log-normal scales: a few of them own most of the large elements."""
    scales = torch.exp(1.5 * torch.randn(50, generator=generator))
    return gaussian(n, generator).mul_(scales.repeat_interleave(-(-n // 50))[:n])


DATA = {"gaussian": gaussian, "laplace": laplace, "50 layers": layers}


def ours(x: Tensor, k: int) -> Callable[[], object]:
    indices = torch.empty(k, dtype=torch.int32)
    candidates = torch.empty(top_k_capacity(x.numel(), k), dtype=torch.int32)
    return lambda: top_k(x, k, indices, candidates)


def contestants(x: Tensor) -> dict[str, Callable[[], object]]:
    copy = torch.empty_like(x)
    work: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(x), "read": lambda: all_finite(x)}
    for ratio in RATIOS:
        k = round(ratio * x.numel())
        work[f"tersegrad {ratio}"] = ours(x, k)
        work[f"torch.topk {ratio}"] = lambda k=k: torch.topk(x.abs(), k)
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{args.numel} floats, one thread; ms, median [20 %, 80 %]")
    for name, make in DATA.items():
        times = interleave(contestants(make(args.numel, torch.Generator().manual_seed(0))), args.rounds)
        print(f"{name}: copy {times['copy']}, read {times['read']}")
        for ratio in RATIOS:
            mine, theirs = times[f"tersegrad {ratio}"], times[f"torch.topk {ratio}"]
            speedup, copies = theirs.median / mine.median, mine.median / times["copy"].median
            note = f"{speedup:.1f}x faster, {copies:.2f} copies"
            print(f"  {ratio:<6} tersegrad {mine!s:<20} torch.topk {theirs!s:<24} {note}")
        for what, measured in times.items():
            rows += [{"what": what, "data": name, "round": i, "ms": ms} for i, ms in enumerate(measured.rounds)]
    if args.json:
        write_rows(args.json, ({**row, "numel": args.numel, **environment()} for row in rows))


if __name__ == "__main__":
    main()
