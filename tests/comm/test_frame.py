"""Frames: what is refused, by whom, and with which words."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.cases import cases
from tersegrad import Metered, TopK
from tersegrad.comm import frame as frames
from tersegrad.comm import threads
from tersegrad.comm.exchange import start_gather
from tersegrad.comm.frame import FrameError
from tersegrad.core import HEADER_NBYTES, Layout, Payload, Step, accumulate

SPEC = TopK(0.1)
X = torch.linspace(-1, 1, 100)


def at(step: int = 3, numel: int = 100) -> Step:
    return Step(Layout(("layer.weight",), ((numel,),)), step)


def frame(step: int = 3) -> torch.Tensor:
    payload = SPEC.encode(X, SPEC.init(at().layout, 0))
    return frames.seal(payload, SPEC.fingerprint(), at(step)).clone()


def open_it(data: torch.Tensor, rank: int = 2) -> Payload:
    return frames.open_frame(data, SPEC.fingerprint(), at(), rank)


def test_golden_header():
    """The layout is a promise to other versions: these bytes may change only together with VERSION."""
    payload = Payload.empty(3, 3, {}, torch.device("cpu"), meta=b"hello")
    payload.body.copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
    step = Step(Layout(("w",), ((3,),)), 258)
    data = bytes(frames.seal(payload, 0x1122334455667788, step).tolist())
    assert data[:16] == b"TGRD\x02\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00"
    assert struct.unpack("<QQQQQ", data[16:56]) == (0x1122334455667788, 258, step.layout.id, 3, 3)
    assert data[64:] == b"hello\x00\x00\x00\x01\x02\x03"


def test_checksum_is_xxh64_of_header_meta_and_body():
    import xxhash

    data = bytes(frame().tolist())
    body = 64 + 16  # the meta of a sparse payload, with a value codec that has none
    assert struct.unpack("<I", data[8:12])[0] == 16
    seed = xxhash.xxh64(data[:56] + data[64:body]).intdigest()
    assert struct.unpack("<Q", data[56:64])[0] == xxhash.xxh64(data[body:], seed=seed).intdigest()


def test_a_frame_decodes_with_no_other_knowledge():
    decoded = torch.zeros(100)
    accumulate(SPEC, open_it(frame()), decoded)
    assert torch.equal(decoded[decoded != 0], X[decoded != 0])
    assert int((decoded != 0).sum()) == 10


def test_nonfinite_payload_travels_as_a_flag():
    x = X.clone()
    x[7] = float("inf")
    payload = SPEC.encode(x, SPEC.init(at().layout, 0))
    opened = open_it(frames.seal(payload, SPEC.fingerprint(), at()))
    assert not opened.finite
    acc = torch.zeros(100)
    accumulate(SPEC, opened, acc)
    assert bool(acc.isnan().all())


@cases(
    "change says",
    [
        (lambda f: f[:30], "rank 2 sent 30 bytes; a frame has at least 64"),
        (lambda f: f[:-1], "its header says"),
        (lambda f: torch.cat([f, f[:5]]), "its header says"),
        (lambda f: _poke(f, 0, b"HTTP"), "rank 2 sent b'HTTP'"),
        (
            lambda f: _poke(f, 4, b"\x09\x00"),
            "rank 2 sent a frame of version 9, this worker speaks version 2",
        ),
        (lambda f: _poke(f, 6, b"\x80\x00"), "unknown flags 0x0080"),
        (lambda f: _poke(f, 16, bytes(8)), "rank 2 sent a frame for spec 0x0, expected spec 0x"),
        (lambda f: frame(step=4), "rank 2 sent a frame for step 4, expected step 3"),
        (lambda f: _poke(f, 32, bytes(8)), "for bucket 0x0, expected bucket 0x"),
        (lambda f: _poke(f, 40, struct.pack("<Q", 99)), "for numel 99, expected numel 100"),
        (
            lambda f: _poke(f, 48, struct.pack("<Q", 1 << 60)),
            "announced a frame of 1152921504606847056 bytes; at most",
        ),
        (lambda f: _poke(f, 66, b"\xff\xff"), "rank 2's frame is corrupt"),  # meta
        (lambda f: _poke(f, 82, b"\xff\xff"), "rank 2's frame is corrupt"),  # body
        (lambda f: _poke(f, 8, b"\x11"), "its header says"),
        (lambda f: _poke(f, 8, b"\x0f"), "rank 2's frame is corrupt"),  # as long a frame, and shorter meta
        (lambda f: _poke(f, 12, b"\x01"), "0x1 where zeros belong"),
        (lambda f: _poke(f, 24, struct.pack("<Q", 3)[:7] + b"\x01"), "for step"),
    ],
)
def test_wrong_frames_are_refused(change, says):
    with pytest.raises(FrameError, match=says):
        open_it(change(frame()))


def _poke(data: torch.Tensor, at: int, new: bytes) -> torch.Tensor:
    data[at : at + len(new)] = torch.frombuffer(bytearray(new), dtype=torch.uint8)
    return data


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_flipped_byte_is_noticed(place, flip):
    data = frame()
    data[place % data.numel()] ^= flip
    with pytest.raises(FrameError):
        open_it(data)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(FrameError):
        open_it(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))


@cases(what=["spec", "step", "numel"])
def test_one_stray_worker_is_named_on_every_rank(what):
    def work(comm: threads.ThreadComm) -> str:
        stray = comm.rank == 2
        step = at(step=9 if stray and what == "step" else 3, numel=50 if stray and what == "numel" else 100)
        spec = TopK(0.2) if stray and what == "spec" else SPEC
        payload = spec.encode(X[: step.layout.numel], spec.init(step.layout, 0))
        gathering = start_gather(payload, spec.fingerprint(), step, comm, {})
        messages = gathering.wait()
        with pytest.raises(FrameError) as caught:
            gathering.open(messages)
        return str(caught.value)

    messages = threads.run(4, work)
    for rank in (0, 1, 3):
        assert "rank 2 sent a frame for" in messages[rank]
    assert "rank 0 sent a frame for" in messages[2]


def test_frames_of_any_length_travel_in_one_round_and_unpadded():
    lengths = [100, 100, 300, 0, 7, 100]

    def work(comm: threads.ThreadComm) -> None:
        meter, state = Metered(comm), {}
        for step, length in enumerate(lengths):
            mine = length * (1 + comm.rank)
            payload = Payload.empty(mine, 100, {}, torch.device("cpu"))
            payload.body.copy_(torch.arange(mine) % 251 + comm.rank)
            before = meter.total.sent
            gathering = start_gather(payload, 7, at(step), meter, state)
            gathered = gathering.open(gathering.wait())
            for rank, theirs in enumerate(gathered):
                assert torch.equal(theirs.body, (torch.arange(length * (1 + rank)) % 251 + rank).to(torch.uint8))
            assert meter.total.sent - before == 2 * (HEADER_NBYTES + mine)
        assert meter.by_collective["shift"].calls == 2 * len(lengths)

    threads.run(3, work)


def test_a_payload_longer_than_any_can_be_is_not_sent():
    def work(comm: threads.ThreadComm) -> None:
        longest = frames.max_frame_nbytes(at(0).layout) - HEADER_NBYTES
        payload = Payload.empty(longest + 1, 100, {}, torch.device("cpu"))
        with pytest.raises(ValueError, match="can be needed"):
            start_gather(payload, 7, at(0), comm, {})

    threads.run(2, work)


def test_a_frame_is_as_long_as_its_payload_says():
    payload = SPEC.encode(X, SPEC.init(at().layout, 0))
    assert frame().numel() == payload.nbytes == HEADER_NBYTES + 16 + payload.body.numel()
    assert HEADER_NBYTES == 64
