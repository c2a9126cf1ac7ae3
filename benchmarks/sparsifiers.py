"""The sparsifiers that others compare with, on one core: our encoding against the formula in torch operations.

    python benchmarks/sparsifiers.py [--json FILE] [--quick]

Ours is all of ``encode``: selection, indices and values packed into a payload. Torch's is the selection and the
gathering of values alone. "copies" is the time in copies of the vector, "found" how many elements are sent over how
many were asked for. The last row is MomentumCorrection's own work (velocities and masking), with nothing sent;
torch's updates in place. All contestants take turns within each round, so that a noisy machine disturbs all of them
alike.

Torch's formulas are those of the methods as we run them (``docs/methods``): RandomK draws by a permutation; Threshold
is at z, which as many elements of a normal vector exceed; RedSync halves down to a width of 0.001; GaussianK corrects
three times at most; DGC draws its sample of 1 % with replacement, which is the cheapest way in torch.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors import GaussianK, RandomK, RedSync, SampledTopK, Threshold
from tersegrad.core import Compressor, Layout, state
from tersegrad.lab.timing import Times, environment, interleave, write_rows

RATIOS = (0.01, 0.001)
MOMENTUM = 0.9

Work = Callable[[], object]
Select = Callable[[Tensor, float], Tensor]  # the positions to send


def gaussian(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, generator=generator)


def layers(n: int, generator: torch.Generator) -> Tensor:
    """50 layers of log-normal scales: a heavy tail, as that of a whole model's gradient."""
    scales = torch.exp(torch.randn(50, generator=generator))
    x = gaussian(n, generator).mul_(scales.repeat_interleave(-(-n // 50))[:n])
    return x.div_(x.std())


DATA = {"gaussian": gaussian, "50 layers": layers}


# ---- the formulas in torch -----------------------------------------------------------------------


def quantile(ratio: float) -> float:
    return -statistics.NormalDist().inv_cdf(ratio / 2)


def above(magnitude: Tensor, eta: float) -> Tensor:
    return (magnitude > eta).nonzero().flatten()


def random_k(x: Tensor, ratio: float) -> Tensor:
    return torch.randperm(x.numel())[: round(ratio * x.numel())]


def threshold(x: Tensor, ratio: float) -> Tensor:
    return above(x.abs(), quantile(ratio))


def redsync(x: Tensor, ratio: float) -> Tensor:
    magnitude, k = x.abs(), round(ratio * x.numel())
    mean, largest = float(magnitude.mean()), float(magnitude.max())
    low, high, eta = 0.0, 1.0, mean
    while high - low > 0.001:
        middle = (low + high) / 2
        eta = mean + middle * (largest - mean)
        count = int((magnitude > eta).sum())
        if k <= count <= 2 * k:
            break
        low, high = (low, middle) if count < k else (middle, high)
    return above(magnitude, eta)


def gaussian_k(x: Tensor, ratio: float) -> Tensor:
    magnitude, k = x.abs(), round(ratio * x.numel())
    eta = abs(float(x.mean())) + quantile(ratio) * float(x.std())
    for _ in range(3):
        count = int((magnitude > eta).sum())
        if 2 * k <= 3 * count <= 4 * k:
            break
        eta *= 0.5 if count < k else 1.5
    return above(magnitude, eta)


def dgc(x: Tensor, ratio: float) -> Tensor:
    n, magnitude = x.numel(), x.abs()
    sample = magnitude[torch.randint(n, (n // 100,))]
    eta = float(torch.topk(sample, max(1, round(ratio * sample.numel()))).values[-1])
    chosen = (magnitude >= eta).nonzero().flatten()
    if 3 * chosen.numel() <= 4 * ratio * n:
        return chosen
    return chosen[torch.topk(magnitude[chosen], round(ratio * n)).indices]


METHODS: dict[str, tuple[Callable[[float], Compressor], Select]] = {
    "RandomK": (RandomK, random_k),
    "Threshold": (lambda ratio: Threshold(quantile(ratio)), threshold),
    "RedSync": (RedSync, redsync),
    "GaussianK": (GaussianK, gaussian_k),
    "SampledTopK": (SampledTopK, dgc),
}


# ---- contestants ---------------------------------------------------------------------------------


def ours(compressor: Compressor, x: Tensor, found: list[int]) -> Work:
    memory = compressor.init(Layout.flat(x.numel()), 0)

    def encode() -> None:
        compressor.encode(x, memory)
        state.commit(memory)
        found.append(sum(numbers["sent"] for numbers in state.reports(memory)))

    return encode


def in_torch(select: Select, x: Tensor, ratio: float, found: list[int]) -> Work:
    def encode() -> None:
        values = x[select(x, ratio)]
        found.append(values.numel())

    return encode


def momentum(x: Tensor) -> dict[str, Work]:
    velocity, residual, next_velocity, total = (torch.zeros_like(x) for _ in range(4))
    u, v, before = (torch.zeros_like(x) for _ in range(3))
    kernel = kernels.on(x)

    def mine() -> None:
        kernel.add_momentum(x, velocity, residual, MOMENTUM, False, next_velocity, total)
        kernel.mask_sent(velocity, residual, total, MOMENTUM, False, next_velocity)

    def theirs() -> None:
        u.mul_(MOMENTUM).add_(x)
        v.add_(u)
        before.copy_(v)  # to see afterwards what was sent
        u.masked_fill_(before != v, 0.0)

    return {"tersegrad momentum": mine, "torch momentum": theirs}


def measure(x: Tensor, ratio: float, rounds: int) -> tuple[dict[str, Times], dict[str, list[int]]]:
    copy = torch.empty_like(x)
    found: dict[str, list[int]] = {}
    work: dict[str, Work] = {"copy": lambda: copy.copy_(x)}
    for name, (make, select) in METHODS.items():
        work[f"tersegrad {name}"] = ours(make(ratio), x, found.setdefault(f"tersegrad {name}", []))
        work[f"torch {name}"] = in_torch(select, x, ratio, found.setdefault(f"torch {name}", []))
    return interleave(work | momentum(x), rounds), found


def table(times: dict[str, Times], found: dict[str, list[int]], asked: float) -> None:
    for name in [*METHODS, "momentum"]:
        mine, theirs = times[f"tersegrad {name}"], times[f"torch {name}"]
        copies, speedup = mine.median / times["copy"].median, theirs.median / mine.median
        counts = [
            statistics.median(found[f"{who} {name}"]) / asked
            for who in ("tersegrad", "torch")
            if found.get(f"{who} {name}")
        ]
        note = f"found {counts[0]:.2f} (torch {counts[1]:.2f})" if counts else ""
        print(f"  {name:<12} {mine!s:<22} torch {theirs!s:<26} {copies:5.2f} copies {speedup:6.1f}x faster  {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the elements, three rounds")
    args = parser.parse_args()
    numel, rounds = (args.numel // 10, 3) if args.quick else (args.numel, args.rounds)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # for torch's own draws
    rows: list[dict[str, Any]] = []
    print(f"{numel} floats, one thread; ms, median [20 %, 80 %]")
    for data, make in DATA.items():
        x = make(numel, torch.Generator().manual_seed(0))
        for ratio in RATIOS:
            times, found = measure(x, ratio, rounds)
            print(f"{data}, ratio {ratio}: copy {times['copy']}")
            table(times, found, ratio * numel)
            for what, measured in times.items():
                common = {"what": what, "data": data, "ratio": ratio, "numel": numel}
                rows += [{**common, "round": i, "ms": ms} for i, ms in enumerate(measured.rounds)]
                rows += [{**common, "found": count / (ratio * numel)} for count in found.get(what, [])[-1:]]
    if args.json:
        write_rows(args.json, ({**row, **environment()} for row in rows))


if __name__ == "__main__":
    main()
