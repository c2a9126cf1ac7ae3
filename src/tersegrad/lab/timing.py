"""Fair timing on a noisy machine: contestants take turns in every round, and medians are compared with their spread."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tersegrad.core.environment import environment

__all__ = ["Times", "environment", "interleave", "write_rows"]


@dataclass(frozen=True)
class Times:
    """Milliseconds of one contestant, one number a round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.rounds)

    def __str__(self) -> str:
        """Median, and the 20th and 80th percentile in brackets."""
        if len(self.rounds) < 2:
            return f"{self.median:.1f}"
        low, *_, high = statistics.quantiles(self.rounds, n=5)
        return f"{self.median:.1f} [{low:.1f}, {high:.1f}]"


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Runs every contestant once a round; a slow moment of the machine hits all of them alike.

    With ``clock=time.process_time``, what other processes do in the meantime does not count.
    """
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-warmup, rounds):
        for name, work in contestants.items():
            started = clock()
            work()
            if turn >= 0:
                measured[name].append(1e3 * (clock() - started))
    return {name: Times(tuple(values)) for name, values in measured.items()}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON line a measurement."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
