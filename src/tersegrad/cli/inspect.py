"""``tersegrad inspect``: what a spec does to one vector, or a whole method to the gradients of two workers."""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tersegrad.cli import whole
from tersegrad.comm.units import show_bytes
from tersegrad.core import HEADER_NBYTES, Compressor, Layout, Reducer, needs_of, sections
from tersegrad.engine.roundtrip import roundtrip
from tersegrad.plan import made_up
from tersegrad.plan.made_up import Gradients


def run(args: argparse.Namespace) -> int:
    specs = {label: spec for text in args.spec for label, spec in whole.expand(text).items()}
    x, gradients = vector_of(args)
    for label, spec in specs.items():
        codec = whole.codec_of(spec)
        if codec is not None:
            _inspect_codec(label, codec, x)
        else:
            assert isinstance(spec, Reducer)
            _inspect_whole(label, spec, gradients)
    return 0


def vector_of(args: argparse.Namespace) -> tuple[Tensor, Gradients]:
    """The vector that codecs are given, and the gradients that whole methods are given."""
    if args.gradient is None:
        numel = args.numel if args.shape is None else math.prod(args.shape)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(args.seed))
        gradients = made_up.gaussian(_layout(args.shape, numel), args.seed)
        print(f"Gaussian vector of {numel} elements, {show_bytes(4 * numel)} in float32")
        return x, gradients
    loaded = load_gradient(args.gradient, args.key)
    print(f"{args.gradient}: {loaded.numel()} elements, {show_bytes(4 * loaded.numel())} in float32")
    shape = args.shape or (tuple(loaded.shape) if loaded.dim() > 1 else None)
    x = loaded.reshape(-1)
    return x, Gradients(x, _layout(shape, x.numel()))


def _layout(shape: tuple[int, ...] | None, numel: int) -> Layout:
    if shape is None:
        return made_up.layout_of(numel)
    if math.prod(shape) != numel:
        raise ValueError(f"--shape {'x'.join(map(str, shape))} has {math.prod(shape)} elements, and there are {numel}.")
    return Layout(("weight",), (shape,))


def _inspect_codec(label: str, compressor: Compressor, x: Tensor) -> None:
    decoded, payload = roundtrip(compressor, x, seed=0)
    parts = {"header": HEADER_NBYTES, **sections(compressor, payload)}
    error = float((decoded - x).norm() / x.norm()) if float(x.norm()) else 0.0
    sent = int((decoded != 0).sum())
    _headline(label, repr(compressor))
    print(f"  payload  {show_bytes(payload.nbytes)} = {' + '.join(f'{k} {v}' for k, v in parts.items())} bytes")
    print(f"  ratio    {4 * x.numel() / payload.nbytes:.1f}x fewer bytes than float32")
    print(f"  sent     {sent} of {x.numel()} elements are non-zero after decoding ({sent / max(1, x.numel()):.3%})")
    if sent and "indices" in parts:
        print(f"  indices  {8 * parts['indices'] / sent:.2f} bits each")
    print(f"  error    {error:.4f} = |decoded - x| / |x|")
    _beside(x, whole.share(None, sent / x.numel() if x.numel() else None, payload.nbytes, x.numel()))


def _inspect_whole(label: str, reducer: Reducer, gradients: Gradients) -> None:
    method = whole.Whole(reducer, gradients)
    seen = method.step()
    numel, density = gradients.layout.numel, whole.density_of(seen.said)
    _headline(label, repr(reducer))
    print(f"  run      step {method.steps} of {whole.WORKERS} workers, on {gradients}")
    if needs_of(reducer).squares is not None:
        print(f"  squares  of single samples: made up, as of {made_up.SAMPLES} samples with that noise")
    for name, figures in ((n, f) for said in seen.said for n, f in said.get("layer", {}).items()):
        print(f"  basis    {name}: {_shown_basis(figures)}")
    print(f"  payload  {show_bytes(seen.nbytes)} of each worker ({seen.nbytes} bytes)")
    print(f"  ratio    {4 * numel / max(1, seen.nbytes):.1f}x fewer bytes than float32")
    if density is not None:
        print(f"  sent     {round(density * numel)} of {numel} elements ({density:.3%})")
    print(f"  time     {seen.encode:.2f} ms before the first message, {seen.decode:.2f} ms after it")
    print(f"  error    {whole.error_of(seen):.4f} = |not sent| / |gradient and residual|, of the means over workers")
    _beside(seen.total, whole.share(reducer, density, seen.nbytes, numel))


def _shown_basis(figures: dict[str, Any]) -> str:
    shown = f"{figures['coefficients']} coefficients for every {figures['slice_length']} elements"
    lost = figures["held_out_loss"]
    return shown if lost is None else f"{shown}, which miss {lost:.0%} of the energy of other steps"


def _headline(label: str, expression: str) -> None:
    print(f"\n{expression}" if label == expression else f"\n{label} = {expression}")


def _beside(x: Tensor, ratio: float) -> None:
    print(f"  topk     {whole.topk_error(x, ratio):.4f} = the error of torch.topk of {100 * ratio:.4g} % of the same")


def load_gradient(path: Path, key: str | None) -> Tensor:
    """A float32 tensor out of a .pt, .npy or .npz file."""
    if path.suffix == ".npy":
        import numpy as np

        return torch.from_numpy(np.load(path)).float()
    if path.suffix == ".npz":
        import numpy as np

        arrays = np.load(path)
        numeric = {name: arrays[name] for name in arrays.files if arrays[name].dtype.kind == "f"}
        return torch.from_numpy(_pick(numeric, key, path)).float()
    if path.suffix == ".pt":
        loaded = torch.load(path, weights_only=True)
        tensor = _pick(loaded, key, path) if isinstance(loaded, dict) else loaded
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path} holds a {type(tensor).__name__}, not a tensor. Name one with --key.")
        return tensor.float()
    raise ValueError(f"{path}: a gradient is read from .pt, .npy or .npz files.")


def _pick(items: dict, key: str | None, path: Path):  # type: ignore[no-untyped-def,type-arg]
    if not items:
        raise ValueError(f"{path} holds no floating-point array.")
    if key is None:
        return next(iter(items.values()))
    if key not in items:
        raise ValueError(f"{path} has no {key!r}. It has: {', '.join(map(str, items))}.")
    return items[key]
