"""Quantiser baselines on one core: encode and accumulate, against copying the vector once and against plain torch.

    python benchmarks/quantisers.py [--numel N] [--short N] [--rounds R] [--json FILE]

All contestants take turns within each round, so that a noisy machine disturbs all of them alike. Encoding includes
means or scales, draws and packing. Plain torch is the same compressor with the reference kernels; as that takes seconds
and gigabytes for a long vector, the two are compared on a short one.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors import BF16, QSGD, Blockwise, Natural, OneBit, ScaledSign, TernGrad
from tersegrad.core import Compressor, Layout, accumulate, state
from tersegrad.engine.roundtrip import decode
from tersegrad.kernels import reference
from tersegrad.lab.timing import Times, environment, interleave, write_rows

SPECS: tuple[Compressor, ...] = (
    ScaledSign(),
    OneBit(),
    TernGrad(),
    TernGrad(bucket=512, clip=None),
    Natural(),
    Blockwise(),
    QSGD(4),
    BF16(),
)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compressors use the reference kernels meanwhile."""
    backend = kernels.register("cpu", reference)
    try:
        yield
    finally:
        kernels.unregister(backend)


class Contestant:
    """One quantiser with its state and its last payload."""

    def __init__(self, spec: Compressor, x: Tensor, acc: Tensor):
        self.spec, self.x, self.acc = spec, x, acc
        self.state = spec.init(Layout.flat(x.numel()), 0)
        self.encode()

    def encode(self) -> None:
        self.payload = self.spec.encode(self.x, self.state)
        state.commit(self.state)

    def accumulate(self) -> None:
        accumulate(self.spec, self.payload, self.acc, 0.25)

    def encode_plainly(self) -> None:
        with plain_torch():
            self.encode()

    def accumulate_plainly(self) -> None:
        with plain_torch():
            self.accumulate()

    def error(self) -> float:
        return float((decode(self.spec, self.payload, self.state) - self.x).norm() / self.x.norm())

    def report(self, times: dict[str, Times], short: dict[str, Times]) -> str:
        parts = []
        for what in ("encode", "accumulate"):
            took, name = times[f"{what} {self.spec!r}"], f"{what} {self.spec!r}"
            gain = short[f"plain {name}"].median / short[name].median
            parts.append(f"{what} {took!s:<20} {took.median / times['copy'].median:5.2f} copies, {gain:5.1f}x plain")
        size = f"{self.payload.nbytes / self.x.numel():6.4f} bytes an element, error {self.error():.4f}"
        return f"  {self.spec!r:<32} {'   '.join(parts)}   {size}"


def gaussian(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(0.1)


def contestants(x: Tensor, plain: bool) -> tuple[dict[str, Callable[[], object]], list[Contestant]]:
    acc = torch.zeros_like(x)
    work: dict[str, Callable[[], object]] = {"copy": lambda: acc.copy_(x), "add": lambda: acc.add_(x)}
    quantisers = [Contestant(spec, x, acc) for spec in SPECS]
    for quantiser in quantisers:
        work[f"encode {quantiser.spec!r}"] = quantiser.encode
        work[f"accumulate {quantiser.spec!r}"] = quantiser.accumulate
        if plain:
            work[f"plain encode {quantiser.spec!r}"] = quantiser.encode_plainly
            work[f"plain accumulate {quantiser.spec!r}"] = quantiser.accumulate_plainly
    return work, quantisers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--short", type=int, default=1_000_000, help="elements to compare with plain torch on")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    short = interleave(contestants(gaussian(args.short), plain=True)[0], args.rounds)
    work, quantisers = contestants(gaussian(args.numel), plain=False)
    times = interleave(work, args.rounds)
    print(f"{args.numel} Gaussian floats ({args.short} against plain torch), one thread; ms, median [20 %, 80 %]")
    for what in ("copy", "add"):
        print(f"  {what:<32} {times[what]!s:<20} {times[what].median / times['copy'].median:5.2f} copies")
    for quantiser in quantisers:
        print(quantiser.report(times, short))
    if args.json:
        rows = (
            {"what": what, "round": i, "ms": ms, "numel": numel, **environment()}
            for numel, all_times in ((args.short, short), (args.numel, times))
            for what, measured in all_times.items()
            for i, ms in enumerate(measured.rounds)
        )
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
