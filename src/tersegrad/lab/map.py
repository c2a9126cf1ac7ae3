"""The map: where compression wins and where it loses, as step time over bandwidth and method."""

import json
import statistics
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tersegrad.lab import plots
from tersegrad.lab.methods import Method
from tersegrad.lab.train import Plan, read_events, train

DENSE = ("none", "bf16", "fp16", "torch:bf16", "torch:fp16")  # baselines: uncompressed, or a cast to half precision
SKIP = 4  # steps: DDP rebuilds its buckets, adaptive methods adapt


@dataclass(frozen=True)
class Cell:
    """One method on one link."""

    spec: str
    bandwidth: str
    ms: float  # median step


def draw(plan: Plan, bandwidths: list[str], console: Console) -> int:
    """Runs every method for a few steps on every link, and writes ``map.json`` and ``map.png``."""
    if not set(plan.specs) & set(DENSE):
        raise ValueError(f"a map needs a dense baseline to compare with. Add one of: {', '.join(DENSE)}.")
    asked = {Method(spec).settled().text: spec for spec in plan.specs}  # a few steps would all be warm-up
    cells = []
    for bandwidth in bandwidths:
        there = replace(plan, specs=tuple(asked), bandwidth=bandwidth, out=plan.out / bandwidth)
        train(there, console)
        cells += [Cell(asked[c.spec], bandwidth, step_ms(Path(c.file))) for c in there.configs()]
    rows = with_ratios(cells)
    about = {"workload": plan.workload, "workers": plan.workers, "baseline": "best dense", "command": plan.command}
    (plan.out / "map.json").write_text(json.dumps({**about, "cells": rows}, indent=1) + "\n")
    picture = plots.heat_map(rows, plan.out / "map.png")
    console.print(_table(rows, bandwidths))
    console.print(f"Picture: {picture}   Numbers: {plan.out / 'map.json'}")
    return 0


def step_ms(file: Path) -> float:
    """Median time of a step, without the first ones."""
    steps = [event for event in read_events(file) if event["event"] == "step"]
    times = [
        1e3 * (b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(steps) if a["step"] >= SKIP
    ]
    if not times:
        raise ValueError(f"{file} has too few steps to time. Ask for more than {SKIP + 1} with --steps.")
    return float(statistics.median(times))


def with_ratios(cells: list[Cell]) -> list[dict[str, Any]]:
    """Each cell's step time over that of the fastest dense method on the same link."""
    best = {
        bandwidth: min(c.ms for c in cells if c.bandwidth == bandwidth and c.spec in DENSE)
        for bandwidth in {c.bandwidth for c in cells}
    }
    return [{"spec": c.spec, "bandwidth": c.bandwidth, "ms": c.ms, "ratio": c.ms / best[c.bandwidth]} for c in cells]


def _table(rows: list[dict[str, Any]], bandwidths: list[str]) -> Table:
    table = Table(title="Step time over that of the best dense method on the same link (below 1: compression wins)")
    table.add_column("spec")
    for bandwidth in bandwidths:
        table.add_column(bandwidth, justify="right")
    for spec in dict.fromkeys(row["spec"] for row in rows):
        by_link = {row["bandwidth"]: row for row in rows if row["spec"] == spec}
        table.add_row(spec, *(f"{by_link[b]['ratio']:.2f}  ({by_link[b]['ms']:.0f} ms)" for b in bandwidths))
    return table
