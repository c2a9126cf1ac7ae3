"""Which elements are large? SIDCo's three laws against exact top-k and other threshold estimators, on one core.

    python benchmarks/thresholds.py [--gradient FILE.npz] [--json FILE] [--quick]

Time is that of finding the positions to send, nothing else; all contestants take turns in every round. "achieved" is
how many elements were found, over how many should have been, on several vectors that no contestant has seen before.
SIDCo has a controller: it practises on other vectors of the same kind (for a real gradient: on noisy copies of it),
and what a new controller finds at its first step stands in a column of its own. SIDCo never sends more than its cap.

The others are written as they are published, in torch operations, and then select with our kernel:

- DGC (Lin et al., ICLR 2018): the threshold is that of top-k in a random sample of 1 %; if more than 4/3 k pass, top-k
  among those. "randperm" draws the sample by a permutation of all positions, as a widely used implementation does.
- RedSync (Fang et al., JPDC 2019): halves the interval from mean to maximum until k to 2 k pass, or its width is 0.2 of
  the first one. "to the end" goes on to 0.001.
- GaussianK (Shi et al., 2019): the threshold of a normal law fitted to the magnitudes; while the count is not within a
  third of k, it is halved or raised by half, at most three times.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors import SIDCo, Sparse, TopK
from tersegrad.core import Layout, state
from tersegrad.lab.timing import environment, interleave, write_rows

RATIOS = (0.1, 0.01, 0.001)
PRACTICE = 40  # steps until SIDCo's controller has settled
LAWS = {"SIDCo-E": "exponential", "SIDCo-P": "pareto", "SIDCo-GP": "gamma"}
VECTORS = {260_000: 10, 2_600_000: 6, 26_000_000: 4}  # Gaussian vectors of each length
ROUNDS = {260_000: 5, 2_600_000: 4, 26_000_000: 2}  # with each of them, after one to warm up

Find = Callable[[Tensor], int]  # finds the positions to send, returns how many


# ---- the contestants -----------------------------------------------------------------------------


def ours(compressor: Sparse, numel: int, practice: Iterable[Tensor] = ()) -> Find:
    state_ = compressor.init(Layout.flat(numel), 0)

    def find(x: Tensor) -> int:
        chosen = compressor.select(x, state_)
        state.commit(state_)
        assert chosen is not None, "all vectors here are finite"
        return chosen.numel()

    for x in practice:
        find(x)
    return find


def torch_topk(ratio: float, numel: int) -> Find:
    return lambda x: torch.topk(x.abs(), max(1, int(ratio * numel))).indices.numel()


def by_threshold(estimate: Callable[[Tensor, int], float], ratio: float, numel: int) -> Find:
    found = torch.empty(numel, dtype=torch.int32)
    k = max(1, int(ratio * numel))
    return lambda x: _count(x, estimate(x, k), found)


def _count(x: Tensor, eta: float, found: Tensor) -> int:
    return int(kernels.read(kernels.on(x).above(x, eta, found))[0])


def redsync(width: float) -> Callable[[Tensor, int], float]:
    def estimate(x: Tensor, k: int) -> float:
        magnitude = x.abs()
        mean, largest = float(magnitude.mean()), float(magnitude.max())
        low, high = 0.0, 1.0
        eta = mean
        while high - low > width:
            middle = (low + high) / 2
            eta = mean + middle * (largest - mean)
            count = int((magnitude > eta).sum())
            if k <= count < 2 * k:
                break
            low, high = (low, middle) if count < k else (middle, high)
        return eta

    return estimate


def gaussian_k(x: Tensor, k: int) -> float:
    magnitude = x.abs()
    z = statistics.NormalDist().inv_cdf(1 - k / x.numel() / 2)
    eta = float(magnitude.mean()) + z * float(magnitude.std())
    for _ in range(3):
        count = int((magnitude > eta).sum())
        if 2 * k <= 3 * count <= 4 * k:
            break
        eta *= 0.5 if count < k else 1.5
    return eta


def dgc(draw: Callable[[int, int], Tensor], ratio: float, numel: int) -> Find:
    found = torch.empty(numel, dtype=torch.int32)
    k = max(1, int(ratio * numel))

    def find(x: Tensor) -> int:
        sample = x[draw(numel, numel // 100)].abs()
        eta = torch.topk(sample, max(1, int(ratio * sample.numel()))).values[-1]
        count = _count(x, float(eta), found)
        if 3 * count <= 4 * k:
            return count
        passed = found[:count]
        best = torch.topk(x.index_select(0, passed).abs(), k).indices
        return passed[best].numel()

    return find


def randint(numel: int, size: int) -> Tensor:
    return torch.randint(numel, (size,))


def randperm(numel: int, size: int) -> Tensor:
    return torch.randperm(numel)[:size]


def contestants(ratio: float, numel: int, practice: list[Tensor]) -> dict[str, Find]:
    settled = {
        name: ours(SIDCo(ratio, law=law), numel, islice(cycle(practice), PRACTICE)) for name, law in LAWS.items()
    }
    return settled | {
        "TopK": ours(TopK(ratio), numel),
        "torch.topk": torch_topk(ratio, numel),
        "DGC": dgc(randint, ratio, numel),
        "DGC, randperm": dgc(randperm, ratio, numel),
        "RedSync": by_threshold(redsync(0.2), ratio, numel),
        "RedSync, to the end": by_threshold(redsync(0.001), ratio, numel),
        "GaussianK": by_threshold(gaussian_k, ratio, numel),
    }


# ---- measuring -----------------------------------------------------------------------------------


def measure(x: Tensor, practice: list[Tensor], ratio: float, rounds: int) -> list[dict[str, Any]]:
    """Rows of one vector: how many each contestant finds at first sight, and how long it takes."""
    numel = x.numel()
    finders = contestants(ratio, numel, practice)
    found: dict[str, list[int]] = {name: [] for name in finders}
    work = {name: lambda name=name, find=find: found[name].append(find(x)) for name, find in finders.items()}
    times = interleave(work, rounds)
    first = {name: ours(SIDCo(ratio, law=law), numel)(x) for name, law in LAWS.items()}
    rows: list[dict[str, Any]] = []
    for name, ms in times.items():
        row = {"what": name, "achieved": found[name][0] / (ratio * numel)}
        rows.append(row | ({"achieved_at_first": first[name] / (ratio * numel)} if name in first else {}))
        rows += [{"what": name, "round": i, "ms": t} for i, t in enumerate(ms.rounds)]
    return rows


def gaussian(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def noisy(x: Tensor, seed: int) -> Tensor:
    """The same gradient as another batch might give it."""
    return x * (1 + 0.1 * gaussian(x.numel(), seed))


def gaussian_rows(numel: int, vectors: int, rounds: int) -> list[dict[str, Any]]:
    practice = [gaussian(numel, seed) for seed in (-1, -2, -3)]
    rows = []
    for i in range(vectors):
        x = gaussian(numel, i)
        for ratio in RATIOS:
            rows += [{"ratio": ratio, "vector": i, **row} for row in measure(x, practice, ratio, rounds)]
    return rows


def gradient_rows(gradients: Mapping[str, Tensor], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for name, x in gradients.items():
        practice = [noisy(x, seed) for seed in range(5)]
        for ratio in RATIOS:
            rows += [{"ratio": ratio, "vector": name, **row} for row in measure(x, practice, ratio, rounds)]
    return rows


def load(path: Path) -> dict[str, Tensor]:
    """The float arrays of a file, flat; the smaller ones among them are not gradients of a whole model."""
    with np.load(path) as arrays:
        floats = {name: arrays[name] for name in arrays.files if arrays[name].dtype.kind == "f"}
    most = max((a.size for a in floats.values()), default=0)
    gradients = {n: torch.from_numpy(a.reshape(-1).astype(np.float32)) for n, a in floats.items() if a.size == most}
    if most < 1000:
        raise SystemExit(f"{path} holds no array of 1000 floats or more.")
    return gradients


# ---- the table -----------------------------------------------------------------------------------


def percentiles(values: list[float]) -> str:
    low, *_, high = statistics.quantiles(values, n=5)
    middle = statistics.median(values)
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def extremes(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]" if values else ""


def table(title: str, rows: list[dict[str, Any]]) -> None:
    vectors = len({row["vector"] for row in rows})
    print(f"\n{title}; one thread, {vectors} vectors")
    print("ms: median [20 %, 80 %]; achieved, of the target: median [least, most]")
    for ratio in RATIOS:
        print(f"\n{f'ratio {ratio}':<20} {'ms':>24} {'of torch.topk':>14} {'achieved':>24} {'at first':>24}")
        mine = [row for row in rows if row["ratio"] == ratio]
        for name in dict.fromkeys(row["what"] for row in mine):
            ms = statistics.median(numbers(mine, name, "ms")) / statistics.median(numbers(mine, "torch.topk", "ms"))
            columns = (extremes(numbers(mine, name, key)) for key in ("achieved", "achieved_at_first"))
            print(f"{name:<20} {percentiles(numbers(mine, name, 'ms')):>24} {ms:>14.3f}", end="")
            print("".join(f" {column:>24}" for column in columns))


def numbers(rows: list[dict[str, Any]], name: str, key: str) -> list[float]:
    return [row[key] for row in rows if row["what"] == name and key in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, nargs="+", default=list(VECTORS), help="lengths of Gaussian vectors")
    parser.add_argument("--gradient", type=Path, help="real gradients instead: the float arrays of this .npz file")
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    parser.add_argument("--quick", action="store_true", help="the shortest vectors only, and few of them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # for the samples of DGC
    rows: list[dict[str, Any]] = []

    def report(title: str, measured: list[dict[str, Any]], **common: object) -> None:
        table(title, measured)
        rows.extend({**common, **row, **environment()} for row in measured)

    if args.gradient:
        gradients = load(args.gradient)
        numel = next(iter(gradients.values())).numel()
        measured = gradient_rows(gradients, rounds=2 if args.quick else 8)
        report(f"{args.gradient.name}: {numel} elements", measured, data=args.gradient.name, numel=numel)
    else:
        for numel in args.numel[:1] if args.quick else args.numel:
            vectors, rounds = (3, 2) if args.quick else (VECTORS.get(numel, 4), ROUNDS.get(numel, 3))
            measured = gaussian_rows(numel, vectors, rounds)
            report(f"{numel} Gaussian numbers", measured, data="gaussian", numel=numel)
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
