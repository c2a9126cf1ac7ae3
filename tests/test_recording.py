"""Means, residuals and rests are, bit for bit, those of a recording of version 0.1: 20 steps, three workers.

A change that is meant to change results makes the recording anew, and says so.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tersegrad import parse
from tersegrad.core import Layout
from tersegrad.specs import PRESETS
from tersegrad.testing.inputs import GRADIENT, LAYOUT, laplace
from tersegrad.testing.runs import run

RECORDING = json.loads((Path(__file__).parent / "golden" / "recording.json").read_text())
BIG = Layout(("conv", "bias", "matrix"), ((64, 32, 3, 3), (1000,), (1040, 1031)), seed=5)
OF_PRESETS = {repr(parse(preset.spec)) for preset in PRESETS.values()}


def digest(tensors):
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def comparable(spec: str) -> bool:
    """Matrix products and Fourier transforms round as the processor's own libraries do."""
    libraries = any(name in spec for name in ("PowerSGD", "GradiVeQ", "FFT", "Auto()"))
    return not libraries or torch.backends.cpu.get_cpu_capability() == RECORDING["capability"]


def replay(spec: str, recorded: dict, layout: Layout, gradient, in_place: bool) -> None:
    traces = run(parse(spec), 3, gradient, layout, steps=recorded["steps"], in_place=in_place)
    assert digest(traces[0].means) == recorded["means"], f"{spec}: other means"
    assert digest([h for t in traces for h in t.held]) == recorded["held"], f"{spec}: other residuals"
    if not in_place:
        assert digest([r for t in traces for r in t.rests]) == recorded["rests"], f"{spec}: other rests"


def test_the_presets_do_what_they_did():
    replayed = [spec for spec in RECORDING["small"] if spec in OF_PRESETS and comparable(spec)]
    assert len(replayed) >= 20
    for spec in replayed:
        replay(spec, RECORDING["small"][spec], LAYOUT, GRADIENT, in_place=False)


@pytest.mark.slow
def test_all_examples_do_what_they_did_and_the_presets_in_large_buckets():
    for spec in filter(comparable, RECORDING["small"]):
        replay(spec, RECORDING["small"][spec], LAYOUT, GRADIENT, in_place=False)
    gradient = laplace(BIG.numel)
    for spec in filter(comparable, RECORDING["big"]):
        replay(spec, RECORDING["big"][spec], BIG, gradient, in_place=True)
