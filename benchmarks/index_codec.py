"""Size and speed of the index codec, one thread: bits per index beside the entropy bound, and milliseconds.

    python benchmarks/index_codec.py [--json FILE]

All cases take turns within each round, so that a busy moment hits all of them.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tersegrad.compressors import _indices as codec
from tersegrad.lab.timing import environment, interleave, write_rows

N = 25_000_000
DENSITIES = (0.001, 0.01, 0.1)


def uniform(rng: np.random.Generator, density: float) -> NDArray[np.int64]:
    """Every element with the same probability, independently: geometric gaps."""
    return np.flatnonzero(rng.random(N, dtype=np.float32) < density)


def clustered(rng: np.random.Generator, density: float) -> NDArray[np.int64]:
    """Slices of 1000 elements, a third of each chosen: as when few rows of a matrix matter."""
    slices = rng.random(N // 1000) < 3 * density
    return np.flatnonzero(np.repeat(slices, 1000) & (rng.random(N, dtype=np.float32) < 1 / 3))


def adversarial(rng: np.random.Generator, density: float) -> NDArray[np.int64]:
    """Half of the gaps 0 and half of them long, in random order: no law that the code has a parameter for."""
    count = int(N * density)
    gaps = np.where(rng.random(count) < 0.5, 0, int(1.9 / density) - 2)
    indices = np.cumsum(gaps + 1) - 1
    return indices[indices < N]


class Case:
    """One support, with the buffers to write it into and to read it back."""

    def __init__(self, support: Callable[..., NDArray[np.int64]], density: float) -> None:
        self.name = f"{support.__name__} {density:.1%}"
        self.indices = torch.from_numpy(support(np.random.default_rng(0), density).astype(np.int32))
        self.count = self.indices.numel()
        self.buffer = torch.empty(codec.max_nbytes(self.count, N), dtype=torch.uint8)
        self.back = torch.empty_like(self.indices)
        self.form = self.nbytes = 0

    def encode(self) -> None:
        self.form, self.nbytes = codec.encode(self.indices, N, self.buffer)

    def decode(self) -> None:
        codec.decode(self.form, self.buffer[: self.nbytes], self.count, N, self.back)

    def bits(self) -> tuple[float, float]:
        """Of an index: as coded, and n H(k / n) / k, its least cost if all supports of this size are equally likely."""
        p = self.count / N
        return 8 * self.nbytes / self.count, -(math.log2(p) + (1 - p) / p * math.log2(1 - p))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [Case(support, density) for support in (uniform, clustered, adversarial) for density in DENSITIES]
    work = {f"{what} {case.name}": getattr(case, what) for case in cases for what in ("encode", "decode")}
    times = interleave(work, args.rounds)
    print(f"{N} elements, one thread; ms, median [20 %, 80 %]")
    print(f"{'support':<18} {'indices':>9} {'bits each':>9} {'entropy':>8} {'ratio':>6} {'encode':>20} {'decode':>20}")
    rows = []
    for case in cases:
        assert torch.equal(case.back, case.indices)
        bits, bound = case.bits()
        encode, decode = times[f"encode {case.name}"], times[f"decode {case.name}"]
        size = f"{case.count:>9} {bits:>9.3f} {bound:>8.3f} {bits / bound:>6.3f}"
        print(f"{case.name:<18} {size} {encode!s:>20} {decode!s:>20}")
        about = {"support": case.name, "count": case.count, "nbytes": case.nbytes, "bits": bits, "entropy_bits": bound}
        for what, measured in (("encode", encode), ("decode", decode)):
            rows += [{**about, "what": what, "round": i, "ms": ms} for i, ms in enumerate(measured.rounds)]
    if args.json:
        write_rows(args.json, ({**row, **environment()} for row in rows))


if __name__ == "__main__":
    main()
