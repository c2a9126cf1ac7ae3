"""The vectors and frames of the golden files."""

from pathlib import Path

import torch

from tersegrad.comm import frame
from tersegrad.core import Compressor, Layout, Step
from tersegrad.engine.roundtrip import decode

FILE = Path(__file__).parents[1] / "golden" / "frames.json"
LENGTHS = (0, 1, 67, 300)
SEED = 11


def vector(n: int) -> torch.Tensor:
    """Numbers of all magnitudes out of integers alone, so that they are the same bits everywhere."""
    i = torch.arange(n, dtype=torch.int64)
    uniform = ((i * 2654435761) % 2**32).double() / 2**32 - 0.5
    return (uniform * uniform * uniform * 16.0).float()


def step(n: int) -> Step:
    return Step(Layout(("golden",), ((n,),), seed=SEED), number=7)


def frame_of(compressor: Compressor, n: int) -> bytes:
    """The bytes that a worker would send."""
    payload = compressor.encode(vector(n), compressor.init(step(n).layout, SEED))
    return bytes(frame.seal(payload, compressor.fingerprint(), step(n)).tolist())


def decoded(compressor: Compressor, raw: bytes, n: int) -> torch.Tensor:
    """What another worker reads out of them."""
    payload = frame.open_frame(torch.tensor(list(raw), dtype=torch.uint8), compressor.fingerprint(), step(n))
    return decode(compressor, payload, compressor.init(step(n).layout, 0))
