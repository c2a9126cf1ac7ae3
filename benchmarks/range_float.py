"""Dense quantisers on one core: encode and accumulate in N bits an element, against copying the vector once.

    python benchmarks/range_float.py [--numel N] [--rounds R] [--json FILE]

All contestants take turns within each round, so that a noisy machine disturbs all of them alike. Encoding includes the
search for the range (or the scales), packing, and the choice of a mantissa whenever it is due.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quantisers import Contestant
from tersegrad import kernels
from tersegrad.compressors import BF16, QSGD, RangeFloat
from tersegrad.core import Compressor
from tersegrad.kernels.ops import packed_nbytes
from tersegrad.lab.timing import environment, interleave, write_rows

SPECS: tuple[Compressor, ...] = (
    RangeFloat(4),
    RangeFloat(8),
    RangeFloat(10),
    RangeFloat(16),
    RangeFloat(8, mantissa=3, high=1.0),
    QSGD(2),
    QSGD(4),
    QSGD(8),
    BF16(),
)


def contestants(x: Tensor) -> tuple[dict[str, Callable[[], object]], list[Contestant]]:
    acc, codes = torch.zeros_like(x), torch.empty(x.numel(), dtype=torch.uint8)
    packed = torch.empty(packed_nbytes(x.numel(), 4), dtype=torch.uint8)
    codes.random_(16, generator=torch.Generator().manual_seed(1))
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: acc.copy_(x),
        "add": lambda: acc.add_(x),
        "pack 4 bits": lambda: kernels.on(x).pack_bits(codes, 4, packed),
        "unpack 4 bits": lambda: kernels.on(x).unpack_bits(packed, 4, codes),
    }
    quantisers = [Contestant(spec, x, acc) for spec in SPECS]
    for quantiser in quantisers:
        work[f"encode {quantiser.spec!r}"] = quantiser.encode
        work[f"accumulate {quantiser.spec!r}"] = quantiser.accumulate
    return work, quantisers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(args.numel, generator=torch.Generator().manual_seed(0)).mul_(0.1)
    work, quantisers = contestants(x)
    times = interleave(work, args.rounds)
    copy = times["copy"].median
    print(f"{args.numel} Gaussian floats, one thread; ms, median [20 %, 80 %], and the median in copies")
    for what in ("copy", "add", "pack 4 bits", "unpack 4 bits"):
        print(f"  {what:<36} {times[what]!s:<20} {times[what].median / copy:5.2f}")
    for q in quantisers:
        encode, accumulate = times[f"encode {q.spec!r}"], times[f"accumulate {q.spec!r}"]
        ratio = 4 * args.numel / q.payload.nbytes
        print(
            f"  {q.spec!r:<36} encode {encode!s:<20} {encode.median / copy:5.2f}   accumulate {accumulate!s:<20} "
            f"{accumulate.median / copy:5.2f}   {ratio:5.2f}x smaller, error {q.error():.4f}"
        )
    if args.json:
        rows = (
            {"what": what, "round": i, "ms": ms, "numel": args.numel, **environment()}
            for what, measured in times.items()
            for i, ms in enumerate(measured.rounds)
        )
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
