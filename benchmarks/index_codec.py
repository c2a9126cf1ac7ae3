"""Size and speed of the index codec, one thread: bits per index beside the entropy bound, and milliseconds.

    python benchmarks/index_codec.py [--json FILE]

Times are medians (20 % and 80 % percentiles in the JSON), taken in turns so that a busy moment hits all rows.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tersegrad.codecs import indices as codec

N = 25_000_000
DENSITIES = (0.001, 0.01, 0.1)


def uniform(rng: np.random.Generator, density: float) -> NDArray[np.int64]:
    """Every element with the same probability, independently: geometric gaps."""
    return np.flatnonzero(rng.random(N, dtype=np.float32) < density)


def clustered(rng: np.random.Generator, density: float) -> NDArray[np.int64]:
    """Stretches of 1000 elements, a third of each chosen: as when few rows of a matrix matter."""
    stretches = rng.random(N // 1000) < 3 * density
    return np.flatnonzero(np.repeat(stretches, 1000) & (rng.random(N, dtype=np.float32) < 1 / 3))


def adversarial(rng: np.random.Generator, density: float) -> NDArray[np.int64]:
    """Half of the gaps 0 and half of them long, in random order: no law that the code has a parameter for."""
    count = int(N * density)
    gaps = np.where(rng.random(count) < 0.5, 0, int(1.9 / density) - 2)
    indices = np.cumsum(gaps + 1) - 1
    return indices[indices < N]


class Case:
    """One support, with the buffers to write it into and to read it back."""

    def __init__(self, support: Callable[..., NDArray[np.int64]], density: float) -> None:
        self.support, self.density = support.__name__, density
        self.indices = torch.from_numpy(support(np.random.default_rng(0), density).astype(np.int32))
        self.count = self.indices.numel()
        self.buffer = torch.empty(codec.max_nbytes(self.count, N), dtype=torch.uint8)
        self.back = torch.empty_like(self.indices)
        self.times: dict[str, list[float]] = {"encode": [], "decode": []}
        self.nbytes = 0

    def encode(self) -> None:
        self.nbytes = codec.encode(self.indices, N, self.buffer)

    def decode(self) -> None:
        codec.decode(self.buffer[: self.nbytes], self.count, N, self.back)

    def measure(self) -> None:
        for what, work in (("encode", self.encode), ("decode", self.decode)):
            start = time.perf_counter()
            work()
            self.times[what].append(1000 * (time.perf_counter() - start))
        assert torch.equal(self.back, self.indices)

    def rows(self) -> list[dict[str, object]]:
        bits, bound = 8 * self.nbytes / self.count, entropy_bits(self.count)
        shared = {"support": self.support, "density": self.density, "n": N, "count": self.count, "threads": 1}
        shared |= {"nbytes": self.nbytes, "bits_per_index": bits, "entropy_bits_per_index": bound}
        return [shared | {"what": what} | summary(times) for what, times in self.times.items()]


def entropy_bits(count: int) -> float:
    """n H(k / n) / k: what an index costs at least if all supports of this size are equally likely."""
    p = count / N
    return -(math.log2(p) + (1 - p) / p * math.log2(1 - p))


def summary(times: list[float]) -> dict[str, object]:
    low, high = np.percentile(times, [20, 80])
    return {"median_ms": statistics.median(times), "p20_ms": low, "p80_ms": high, "repeats": len(times)}


def show(case: Case) -> str:
    bits, bound = 8 * case.nbytes / case.count, entropy_bits(case.count)
    encode, decode = (statistics.median(case.times[what]) for what in ("encode", "decode"))
    size = f"{case.count:>9,} {bits:>10.3f} {bound:>8.3f} {bits / bound:>7.3f}"
    return f"{case.support:<12} {case.density:>7.1%} {size} {encode:>10.2f} {decode:>10.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = [Case(support, density) for support in (uniform, clustered, adversarial) for density in DENSITIES]
    for case in cases:
        case.measure()  # compiles, and touches the pages
        case.times = {"encode": [], "decode": []}
    for _ in range(arguments.repeats):
        for case in cases:
            case.measure()
    print(f"n = {N:,}, 1 thread, median of {arguments.repeats}\n")
    print("support      density     count bits/index  entropy   ratio  encode ms  decode ms")
    print("\n".join(map(show, cases)))
    if arguments.json:
        rows = [row for case in cases for row in case.rows()]
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
