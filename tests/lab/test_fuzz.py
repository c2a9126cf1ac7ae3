"""A few thousand mutated frames of every codec, and the fuzzer itself against decoders that are broken on purpose."""

import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tersegrad import TopK
from tersegrad.comm import frame as frames
from tersegrad.comm.frame import FrameError
from tersegrad.core import HEADER_NBYTES, Compressor, Layout, Payload, Step
from tersegrad.lab import fuzz
from tersegrad.reducers._segments import Segmentation

CODECS = fuzz.codecs()
FRAMES = 120  # of each codec
# In these runs every access of a kernel is checked; one codec of every kind, because compiling takes seconds each.
BOUNDS_CHECKED = ("TopK(0.1)", "QSGD(bits=6, bucket=64)", "OneBit()")


@pytest.mark.parametrize("name", CODECS)
def test_mutated_frames_are_refused_or_decoded(name):
    fuzz.fuzz(CODECS[name], 10, 2)  # compiles
    with fuzz.limited_memory():
        counts = fuzz.fuzz(CODECS[name], FRAMES, 1)
    assert counts.frames == FRAMES
    assert counts.large == FRAMES * fuzz.SHARE_OF_LARGE
    assert min(counts.refused, counts.rejected, counts.decoded) > 0, "the frames are all of one kind: no fuzzing"


def test_the_same_seed_gives_the_same_frames():
    assert fuzz.fuzz(TopK(0.1), 50, 5) == fuzz.fuzz(TopK(0.1), 50, 5)


@dataclass(frozen=True, repr=False)
class _Sloppy(Compressor):
    """Sends all as float32, and decodes with the fault that it is told."""

    fault: str

    def encode(self, x, state):
        payload = Payload.empty(4 * x.numel(), x.numel(), state, x.device)
        payload.body.view(torch.float32).copy_(x)
        return payload

    def decode_add(self, payload, acc, scale):
        if self.fault == "refuses all":
            raise ValueError("never")
        if payload.body.numel() == 4 * acc.numel():
            acc += scale * payload.body.view(torch.float32)
        elif self.fault == "index":
            raise IndexError("list index out of range")
        elif self.fault == "silent":
            raise ValueError
        elif self.fault == "outside":
            acc.as_strided((1,), (1,), acc.storage_offset() + acc.numel()).fill_(1.0)
        elif self.fault == "half":
            acc[:1] = 1.0
            raise ValueError("too late")
        elif self.fault == "memory":
            torch.empty(1 << 40, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("index", "IndexError: list index out of range"),
        ("silent", "an error without a text"),
        ("outside", "memory outside the accumulator was written"),
        ("half", "changed by a payload that was then refused"),
        ("memory", "RuntimeError"),
    ],
)
def test_the_fuzzer_finds_what_it_looks_for(fault, says):
    with fuzz.limited_memory(), pytest.raises(fuzz.FoundError, match=says) as caught:
        fuzz.fuzz(_Sloppy(fault), 500, 0)
    assert "frame" in caught.value.__notes__[0]


def test_the_fuzzer_sees_a_frame_that_should_have_been_refused(monkeypatch):
    monkeypatch.setattr(frames, "check_body", lambda *_: None)
    with pytest.raises(fuzz.FoundError, match="wrong header or checksum was opened"):
        fuzz.fuzz(TopK(0.1), 2000, 0)


@pytest.mark.slow
def test_kernels_with_bounds_checking(tmp_path):
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tersegrad.lab.fuzz", "--frames", "1500", "--codecs", *BOUNDS_CHECKED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 codecs with a finding" in done.stdout


# ---- arbitrary bytes, for everything that opens a message -----------------------------------------

STEP = Step(Layout(("w",), ((40,),)))
COMPRESSOR = TopK(0.1)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


@given(st.binary(max_size=300))
def test_read_header_refuses_arbitrary_bytes(data):
    with pytest.raises(FrameError, match="rank 3"):
        frames.read_header(as_tensor(data.ljust(HEADER_NBYTES, b"\0")), 3)


@given(st.binary(max_size=300), st.booleans())
def test_a_segment_refuses_arbitrary_bytes(data, plausible):
    segmentation = Segmentation(COMPRESSOR, 1, 0)
    state = segmentation.init(STEP.layout)
    segment = segmentation.segments(STEP, torch.zeros(40), torch.zeros(40), state, 7)[0]
    fields = (0, 8, 0, 7, 0, segment.step.layout.id, 40, 1 << 63)  # all as they should be, and a body without end
    head = frames._FIELDS.pack(frames.MAGIC, frames.VERSION, *fields) if plausible else b""
    with pytest.raises(FrameError, match="rank 3"):
        segment.open(as_tensor((head + data).ljust(HEADER_NBYTES, b"\0")), 3)


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8).copy()


@given(st.binary(max_size=100), st.binary(max_size=400), st.sampled_from(sorted(CODECS)))
def test_arbitrary_meta_and_bodies(meta, body, name):
    target = fuzz.Target.of(CODECS[name], fuzz.SMALL[1])
    fuzz.judge(target, target.frame(fuzz.Parts(as_array(meta), as_array(body))), False, fuzz.Counts())


@pytest.mark.parametrize("name", CODECS)
def test_meta_is_mutated_too(name):
    target = fuzz.Target.of(CODECS[name], fuzz.SMALL[0])
    known = {bytes(parts.meta) for parts in target.valid}
    rng = np.random.default_rng(0)
    drawn = [fuzz._mutated_parts(target.valid[0], target.valid[1], 10, rng) for _ in range(50)]
    changed = [parts for parts in drawn if bytes(parts.meta) not in known]
    assert len(changed) > 10 or known == {b""}


def test_a_codec_that_does_not_decode_its_own_payloads_is_told():
    with pytest.raises(fuzz.FoundError, match="does not decode what it has encoded"):
        fuzz.Target.of(_Sloppy("refuses all"), fuzz.SMALL[0])
