"""Makes frames.json anew: run it after raising ``comm.frame.VERSION``, never instead."""

import json

import torch

from support.golden import FILE, LENGTHS, decoded, frame_of
from support.registered import COMPRESSORS
from tersegrad.comm import frame
from tersegrad.core import Compressor


def entry(compressor: Compressor, n: int) -> dict[str, str]:
    raw = frame_of(compressor, n)
    return {"frame": raw.hex(), "decoded": decoded(compressor, raw, n).numpy().tobytes().hex()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    frames = {repr(compressor): {str(n): entry(compressor, n) for n in LENGTHS} for compressor in COMPRESSORS}
    FILE.write_text(json.dumps({"version": frame.VERSION, "frames": frames}, indent=0, sort_keys=True) + "\n")
