"""``tersegrad inspect``: what a compressor does to one vector."""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from tersegrad.comm.units import show_bytes
from tersegrad.core import HEADER_NBYTES, sections
from tersegrad.engine.roundtrip import compressor_of, roundtrip


def run(args: argparse.Namespace) -> int:
    x = vector_of(args)
    for text in args.spec:
        _inspect_one(text, x)
    return 0


def vector_of(args: argparse.Namespace) -> Tensor:
    if args.gradient is None:
        x = torch.randn(args.numel, generator=torch.Generator().manual_seed(args.seed))
        print(f"Gaussian vector of {x.numel()} elements, {show_bytes(4 * x.numel())} in float32")
    else:
        x = load_gradient(args.gradient, args.key)
        print(f"{args.gradient}: {x.numel()} elements, {show_bytes(4 * x.numel())} in float32")
    return x


def _inspect_one(text: str, x: Tensor) -> None:
    compressor = compressor_of(text)
    decoded, payload = roundtrip(compressor, x, seed=0)
    parts = {"header": HEADER_NBYTES, **sections(compressor, payload)}
    error = float((decoded - x).norm() / x.norm()) if float(x.norm()) else 0.0
    sent = int((decoded != 0).sum())
    print(f"\n{compressor!r}")
    print(f"  payload  {show_bytes(payload.nbytes)} = {' + '.join(f'{k} {v}' for k, v in parts.items())} bytes")
    print(f"  ratio    {4 * x.numel() / payload.nbytes:.1f}x fewer bytes than float32")
    print(f"  sent     {sent} of {x.numel()} elements are non-zero after decoding ({sent / max(1, x.numel()):.3%})")
    if sent and "indices" in parts:
        print(f"  indices  {8 * parts['indices'] / sent:.2f} bits each")
    print(f"  error    {error:.4f} = |decoded - x| / |x|")


def load_gradient(path: Path, key: str | None) -> Tensor:
    """A flat float32 vector out of a .pt, .npy or .npz file."""
    if path.suffix == ".npy":
        import numpy as np

        return torch.from_numpy(np.load(path)).float().reshape(-1)
    if path.suffix == ".npz":
        import numpy as np

        arrays = np.load(path)
        numeric = {name: arrays[name] for name in arrays.files if arrays[name].dtype.kind == "f"}
        return torch.from_numpy(_pick(numeric, key, path)).float().reshape(-1)
    if path.suffix == ".pt":
        loaded = torch.load(path, weights_only=True)
        tensor = _pick(loaded, key, path) if isinstance(loaded, dict) else loaded
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path} holds a {type(tensor).__name__}, not a tensor. Name one with --key.")
        return tensor.float().reshape(-1)
    raise ValueError(f"{path}: a gradient is read from .pt, .npy or .npz files.")


def _pick(items: dict, key: str | None, path: Path):  # type: ignore[no-untyped-def,type-arg]
    if not items:
        raise ValueError(f"{path} holds no floating-point array.")
    if key is None:
        return next(iter(items.values()))
    if key not in items:
        raise ValueError(f"{path} has no {key!r}. It has: {', '.join(map(str, items))}.")
    return items[key]
