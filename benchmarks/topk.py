"""Exact top-k on one core: our kernel against ``torch.topk(x.abs(), k)`` and against copying the vector once.

    python benchmarks/topk.py [--json FILE]

All contestants take turns within each round, so that a noisy machine disturbs all of them alike. The table
has medians over the rounds with 20th and 80th percentiles; ``--json`` writes one row (line) per measurement.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tersegrad.kernels.cpu.select import all_finite, top_k, top_k_capacity

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


def contestants(n: int) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
    for name, make in DATA.items():
        x = make(n, torch.Generator().manual_seed(0))
        copy = torch.empty(n)
        yield {"what": "copy", "data": name}, lambda x=x, copy=copy: copy.copy_(x)
        yield {"what": "read", "data": name}, lambda x=x: all_finite(x)
        for ratio in RATIOS:
            k = round(ratio * n)
            row = {"data": name, "ratio": ratio, "k": k}
            yield {"what": "tersegrad", **row}, ours(x, k)
            yield {"what": "torch.topk", **row}, lambda x=x, k=k: torch.topk(x.abs(), k)


def measure(n: int, rounds: int) -> list[dict[str, Any]]:
    entries = list(contestants(n))
    for _, run in entries:  # compile, and touch every page
        run()
    rows = []
    for turn in range(rounds):
        for row, run in entries:
            start = time.perf_counter()
            run()
            rows.append({**row, "n": n, "round": turn, "ms": 1e3 * (time.perf_counter() - start)})
    return rows


def times(rows: list[dict[str, Any]], **wanted: object) -> list[float]:
    return [row["ms"] for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def spread(values: list[float]) -> str:
    low, *_, high = statistics.quantiles(values, n=5)
    return f"{statistics.median(values):7.1f} [{low:5.1f}, {high:5.1f}]"


def table(rows: list[dict[str, Any]]) -> None:
    header = f"{'tersegrad ms':>22} {'torch.topk ms':>22} {'copy ms':>22} {'read ms':>22}"
    print(f"{'data':10} {'ratio':>6} {header} {'/torch':>7} {'/copy':>6} {'/read':>6}")
    for name in DATA:
        copy, read = times(rows, what="copy", data=name), times(rows, what="read", data=name)
        for ratio in RATIOS:
            mine = times(rows, what="tersegrad", data=name, ratio=ratio)
            theirs = times(rows, what="torch.topk", data=name, ratio=ratio)
            middle = statistics.median(mine)
            columns = " ".join(f"{spread(values):>22}" for values in (mine, theirs, copy, read))
            speedup = statistics.median(theirs) / middle
            print(
                f"{name:10} {ratio:6} {columns} {speedup:6.1f}x {middle / statistics.median(copy):6.2f}"
                f" {middle / statistics.median(read):6.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=25_000_000, help="elements of the vector")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.n, arguments.rounds)
    table(rows)
    if arguments.json:
        versions = {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability()}
        lines = (json.dumps({**row, **versions}) for row in rows)
        arguments.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
