"""Where selection in the frequency domain beats plain top-k at the same bytes, and where it loses, on real gradients.

    python benchmarks/fft_quality.py FILE.npz [FILE.npz ...] [--vector step100] [--json FILE]

A file is what ``benchmarks/gradients.py`` writes: flat gradients, and names and shapes of the parameters. For every way
to cut and order the gradient: |decoded - g| / |g| of FFT, and of TopK with as many bytes and the same value codec.
"""

import argparse
import ast
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tersegrad import FFT, PerTensor, RangeFloat, TopK
from tersegrad.compressors.fft.fourier import LONGEST
from tersegrad.core import Compressor, Layout
from tersegrad.engine.roundtrip import decode
from tersegrad.lab.timing import environment, write_rows

THETAS = (0.5, 0.85, 0.95, 0.99)
CUTS = {
    "whole tensor": {"chunk": LONGEST},
    "4096": {"chunk": 4096},
    "256": {"chunk": 256},
    "row": {"chunk": "row"},
    "row, channels last": {"chunk": "row", "order": "channels_last"},
}


def load(path: Path) -> tuple[Layout, dict[str, Tensor]]:
    """The layout of a bucket that holds all parameters, and the gradients in the file."""
    with np.load(path) as file:
        shapes = tuple(ast.literal_eval(str(shape)) for shape in file["param_shapes"])
        layout = Layout(tuple(map(str, file["param_names"])), shapes)
        names = [name for name in file.files if not name.startswith("param_")]
        return layout, {name: torch.from_numpy(file[name].astype(np.float32)) for name in names}


def measure(compressor: Compressor, x: Tensor, layout: Layout) -> tuple[int, float]:
    """Bytes of the payload, and the relative error."""
    state = compressor.init(layout, 0)
    payload = compressor.encode(x, state)
    return payload.nbytes, float((decode(compressor, payload, state) - x).norm() / x.norm())


def topk_with(nbytes: int, x: Tensor, layout: Layout, bits: int, per_tensor: bool) -> float:
    """The error of the TopK that sends as many bytes, to half a per cent."""
    ratio = min(1.0, 8 * nbytes / (2 * bits * x.numel()))
    for _ in range(20):  # bytes grow almost as the ratio does, so a few rounds are enough
        topk = TopK(ratio, values=RangeFloat(bits))
        sent, error = measure(PerTensor(topk) if per_tensor else topk, x, layout)
        if abs(sent / nbytes - 1) < 0.005 or (ratio == 1.0 and sent < nbytes):
            return error
        ratio = min(1.0, ratio * nbytes / sent)
    raise AssertionError(f"no ratio of TopK sends {nbytes} bytes")


def table(x: Tensor, layout: Layout, bits: int, per_tensor: bool) -> list[dict[str, object]]:
    """One row for each way to cut and each theta."""
    rows: list[dict[str, object]] = []
    for cuts, options in CUTS.items():
        cells = []
        for theta in THETAS:
            fft = FFT(theta, values=RangeFloat(bits), **options)  # type: ignore[arg-type]
            nbytes, error = measure(PerTensor(fft) if per_tensor else fft, x, layout)
            plain = topk_with(nbytes, x, layout, bits, per_tensor)
            rows.append({"cuts": cuts, "theta": theta, "nbytes": nbytes, "error": error, "topk": plain})
            cells.append(f"{error:.3f} / {plain:.3f} ({4 * x.numel() / nbytes:.1f}x)")
        print(f"| {cuts} | {' | '.join(cells)} |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--vector", nargs="+", help="only the gradients of these names")
    parser.add_argument("--bits", type=int, default=10, help="of RangeFloat, for both")
    parser.add_argument("--bucket", action="store_true", help="select in the whole gradient, not in each tensor")
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for path in args.files:
        layout, gradients = load(path)
        for name, x in gradients.items():
            if args.vector and name not in args.vector:
                continue
            print(f"\n{path.name} {name}: {x.numel()} elements; error of FFT / of TopK with the same bytes (ratio)\n")
            print(f"| pieces | {' | '.join(f'theta {theta}' for theta in THETAS)} |\n|{'---|' * (len(THETAS) + 1)}")
            about = {"file": path.name, "vector": name, "bits": args.bits, "bucket": args.bucket, **environment()}
            rows += [{**row, **about} for row in table(x, layout, args.bits, not args.bucket)]
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
