"""FFT sparsification on one core, against the transform alone and against ``torch.topk`` on the magnitudes.

    python benchmarks/fft.py [--json FILE]
    python benchmarks/fft.py --tensors

``rfft`` is ``torch.fft.rfft`` over the same pieces with ``out=`` given, which copies the result; ``rfft, new`` is the
same without ``out=``; ``rfft in blocks`` is that a few pieces at a time, so that its memory stays in the cache. All
contestants take turns within each round. CPU time of one thread: what other processes do does not count, except that
they use the caches.

``--tensors``: a net of 41 small tensors (the slim VGG), selected tensor by tensor or together.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tersegrad import FFT
from tersegrad.compressors.fft import fourier
from tersegrad.core import Compressor, Layout, accumulate, decode_sum, subtract
from tersegrad.core import state as states
from tersegrad.kernels.cpu import fold, top_k
from tersegrad.kernels.ops import top_k_capacity
from tersegrad.lab import workloads
from tersegrad.lab.timing import Times, environment, interleave, write_rows
from tersegrad.specs import parse

BLOCK = fourier.BLOCK
WARMUP = 3  # encodings before the clock starts: the value codec chooses its mantissa in the first
WORKERS = 4  # whose payloads are decoded
PER_TENSOR = ("PerTensor(FFT())", "FFT(select='tensor')", "FFT()")


class Encode:
    """A compressor with its state, on one vector."""

    def __init__(self, compressor: FFT, x: Tensor, shape: tuple[int, ...]):
        self.compressor, self.x, self.rest = compressor, x, torch.empty_like(x)
        self.state = compressor.init(Layout(("x",), (shape,)), 0)
        for _ in range(WARMUP):
            self.encode()
        self.acc = torch.zeros(compressor.domain(x.numel()))

    def encode(self) -> None:
        self.payload = self.compressor.encode(self.x, self.state)
        states.commit(self.state)

    def accumulate(self) -> None:
        accumulate(self.compressor, self.payload, self.acc, 0.25)

    def inverse(self) -> None:
        self.compressor.inverse(self.acc, self.rest, self.state)

    def subtract(self) -> None:
        subtract(self.compressor, self.payload, self.rest, self.state)


def selection(half: Tensor, k: int) -> Callable[[], object]:
    """Magnitudes and the k largest of them, when all bins are written and compared."""
    count = half.shape[0] * (half.shape[1] - 1)
    bins, magnitudes = torch.empty(2 * count), torch.empty(count)
    indices = torch.empty(k, dtype=torch.int32)
    candidates = torch.empty(top_k_capacity(count, k), dtype=torch.int32)

    def run() -> None:
        fold(half, bins, magnitudes)
        top_k(magnitudes, k, indices, candidates)

    return run


def contestants(x: Tensor, length: int, theta: float) -> dict[str, Callable[[], object]]:
    pieces = x.view(-1, length)
    half = torch.empty(pieces.shape[0], length // 2 + 1, dtype=torch.complex64)
    rows = max(1, BLOCK // length)
    copy, k = torch.empty_like(x), round((1 - theta) * x.numel() / 2)

    def in_blocks() -> None:
        for some in pieces.split(rows):
            torch.fft.rfft(some, norm="ortho")

    exact, fitted = (Encode(FFT(theta, select=s), x, tuple(pieces.shape)) for s in ("topk", "sidco"))
    return {
        "copy": lambda: copy.copy_(x),
        "rfft": lambda: torch.fft.rfft(pieces, norm="ortho", out=half),
        "rfft, new": lambda: torch.fft.rfft(pieces, norm="ortho"),
        "rfft in blocks": in_blocks,
        "encode": exact.encode,
        "encode, sidco": fitted.encode,
        "accumulate": exact.accumulate,
        "inverse": exact.inverse,
        "subtract": exact.subtract,
        "selection": selection(half, k),
        "abs + torch.topk": lambda: torch.topk(half.abs().view(-1), k),
    }


def notes(times: dict[str, Times]) -> dict[str, str]:
    rfft, new = times["rfft"].median, times["rfft, new"].median
    shares = {name: times[name].median for name in ("encode", "encode, sidco", "inverse", "subtract")}
    said = {name: f"{ms / rfft:.2f}x rfft, {ms / new:.2f}x rfft, new" for name, ms in shares.items()}
    said["selection"] = f"{times['abs + torch.topk'].median / times['selection'].median:.1f}x faster than abs + topk"
    return said


def per_tensor(rounds: int) -> None:
    """Encode, take out what was sent, and decode four payloads, of a net with many small tensors."""
    model = workloads.find("cifar-vgg-slim").model(0)
    named = list(model.named_parameters())
    layout = Layout(tuple(name for name, _ in named), tuple(tuple(p.shape) for _, p in named))
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    print(f"{len(layout.names)} tensors, {layout.numel} floats, one thread; ms of CPU time, median [20 %, 80 %]")
    for text in PER_TENSOR:
        times = interleave(steps_of(parse(text), layout, x), rounds, WARMUP, clock=time.process_time)  # type: ignore[arg-type]
        total = sum(ms.median for ms in times.values())
        print(f"  {text:<22} " + "   ".join(f"{name} {ms}" for name, ms in times.items()) + f"   together {total:.1f}")


def steps_of(compressor: Compressor, layout: Layout, x: Tensor) -> dict[str, Callable[[], object]]:
    state, rest, out = compressor.init(layout, 0), torch.empty_like(x), torch.empty_like(x)
    payload = compressor.encode(x, state)

    def encode() -> None:
        nonlocal payload
        payload = compressor.encode(x, state)
        states.commit(state)

    return {
        "encode": encode,
        "subtract": lambda: subtract(compressor, payload, rest.copy_(x), state),
        "decode": lambda: decode_sum(compressor, [payload] * WORKERS, 1 / WORKERS, out, state),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1 << 22, help="default: about a bucket of DDP")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--lengths", type=int, nargs="+", default=[576, 4096])
    parser.add_argument("--theta", type=float, nargs="+", default=[0.85, 0.95])
    parser.add_argument("--tensors", action="store_true", help="many small tensors instead of one")
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.tensors:
        per_tensor(args.rounds)
        return
    rows = []
    for length in args.lengths:
        numel = args.numel // length * length
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        for theta in args.theta:
            times = interleave(contestants(x, length, theta), args.rounds, clock=time.process_time)
            print(f"\n{numel} floats in pieces of {length}, theta {theta}; ms of CPU time, median [20 %, 80 %]")
            said = notes(times)
            for name, ms in times.items():
                print(f"  {name:<18} {ms!s:>26}   {said.get(name, '')}")
                about = {"what": name, "length": length, "theta": theta, "numel": numel, **environment()}
                rows += [{**about, "round": i, "ms": t} for i, t in enumerate(ms.rounds)]
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
