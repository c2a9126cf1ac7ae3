"""Golden bytes: the frame of every codec, committed. Another format must have another version."""

import json

import torch

from support.golden import FILE, LENGTHS, decoded, frame_of
from support.registered import COMPRESSORS
from tersegrad.comm import frame

GOLDEN = json.loads(FILE.read_text())
HOW = "Raise comm.frame.VERSION and make the file anew: PYTHONPATH=tests python tests/golden/make.py"


def test_the_file_is_of_this_version_and_holds_every_codec():
    assert GOLDEN["version"] == frame.VERSION, HOW
    assert set(GOLDEN["frames"]) == {repr(compressor) for compressor in COMPRESSORS}, HOW


def test_every_codec_makes_these_bytes():
    for compressor in COMPRESSORS:
        if "FFT" in repr(compressor):
            continue  # the last bit of a bin is the processor's; below, its bytes are decoded
        for n in LENGTHS:
            made, golden = frame_of(compressor, n).hex(), GOLDEN["frames"][repr(compressor)][str(n)]["frame"]
            assert made == golden, f"{compressor!r} makes other bytes of {n} elements. {HOW}"


def test_every_codec_reads_these_bytes():
    for compressor in COMPRESSORS:
        for n in LENGTHS:
            golden = GOLDEN["frames"][repr(compressor)][str(n)]
            found = decoded(compressor, bytes.fromhex(golden["frame"]), n)
            want = torch.frombuffer(bytearray.fromhex(golden["decoded"]), dtype=torch.float32) if n else found
            tolerance = 1e-5 if "FFT" in repr(compressor) else 0.0
            off = float((found - want).abs().max()) if n else 0.0
            assert off <= tolerance, f"{compressor!r} reads other numbers out of {n} elements. {HOW}"
