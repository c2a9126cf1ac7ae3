"""Fuzzing: valid frames of every codec are mutated by the million, and must be rejected with a message or decoded.

    python -m tersegrad.lab.fuzz --frames 1000000 --seed 0

Mutated meta and bodies are sealed again, so that they pass the checksum and reach the decoder; a mutated header is
sealed again or not. One frame in twenty has the size of a real bucket, of 2**20 or 2**21 floats, which uses other
kernels.
Findings are: any error but a ValueError with a message, a write outside the accumulator, a large allocation (the
address space is limited), or a frame that takes seconds. The seed determines everything.
"""

import argparse
import faulthandler
import math
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tersegrad.comm import frame as frames
from tersegrad.compressors import PerTensor
from tersegrad.core import (
    HEADER_NBYTES,
    Compressor,
    Layout,
    Payload,
    State,
    Step,
    Transformed,
    accumulate,
    adds_in_place,
    decode_sum,
    padded,
)
from tersegrad.specs import parse, registry
from tersegrad.testing.inputs import DEGENERATE, LARGE, laplace

GUARD = 32  # floats on both sides of an accumulator that must not be written
HEADROOM = 512 << 20  # bytes that decoding may allocate beyond those at the start: far more than any valid frame needs
SECONDS = 5.0  # limit of processor time per frame; a valid one takes some milliseconds
SHARE_OF_LARGE = 0.05  # of all frames
HANGS = 300.0  # seconds without progress after which the process prints its stack and ends

Bytes = np.ndarray  # of uint8

SMALL = (
    Layout(("a.weight", "a.bias", "b.weight"), ((37, 20), (20,), (3, 5, 3, 3)), seed=7),
    Layout(("a.bias", "b.bias"), ((5,), (64,)), seed=7),
    Layout(("x",), ((1,),), seed=7),
)
LARGEST = Layout(("a.weight", "a.bias"), ((2048, 1023), (2048,)), seed=7)  # 2**21 elements
STEP = 0  # of all frames


class FoundError(AssertionError):
    """A finding: a frame that caused something that must never happen."""


@dataclass
class Counts:
    """How the mutated frames of one codec were handled."""

    refused: int = 0  # by the frame's own checks
    rejected: int = 0  # by the decoder
    decoded: int = 0
    large: int = 0  # among them, frames of a real bucket's size
    slowest: float = field(default=0.0, compare=False)  # seconds of processor time
    messages: set[str] = field(default_factory=set)  # the different texts, without their numbers

    @property
    def frames(self) -> int:
        return self.refused + self.rejected + self.decoded


def codecs() -> dict[str, Compressor]:
    """Every registered compressor's examples, and the private codecs of reducers."""
    classes = [cls for cls in registry().values() if issubclass(cls, Compressor)]
    found = [parse(text) for cls in classes for text in cls.examples or (f"{cls.__name__}()",)]
    private = ("VGC()", "VGC(tau=0.1)", "VGC(layout='words')", "VGC(tau=0.1, rule='paper')")
    found += [parse(text)._exchange.compressor for text in private]  # type: ignore[attr-defined]
    return {repr(codec): codec for codec in found if isinstance(codec, Compressor)}


# ---- valid frames ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """The contents of a frame after its header."""

    meta: Bytes
    body: Bytes

    @property
    def joined(self) -> Bytes:
        """As in a frame: meta is padded to whole words."""
        padding = np.zeros(padded(len(self.meta)) - len(self.meta), dtype=np.uint8)
        return np.concatenate([self.meta, padding, self.body])


@dataclass
class Target:
    """One codec and one bucket: valid payloads, and guarded buffers to decode one or several of them into."""

    codec: Compressor
    layout: Layout
    valid: list[Parts]
    state: State
    guarded: Tensor
    acc: Tensor
    out: Tensor

    @staticmethod
    def of(codec: Compressor, layout: Layout) -> "Target":
        """A target with the payloads of some vectors; each of them must decode."""
        state, valid = _state(codec, layout), []
        for x in _vectors(layout.numel):
            payload = codec.encode(x, state)
            if payload.finite:
                meta = np.frombuffer(payload.meta, dtype=np.uint8).copy()
                valid.append(Parts(meta, payload.body.numpy().copy()))
        length = codec.domain(layout.numel) if isinstance(codec, Transformed) else layout.numel
        guarded = torch.zeros(length + layout.numel + 3 * GUARD)
        acc, out = guarded[GUARD : GUARD + length], guarded[length + 2 * GUARD : -GUARD]
        return Target(codec, layout, valid, state, guarded, acc, out)._checked()

    def _checked(self) -> "Target":
        counts = Counts()
        for parts in self.valid:
            judge(self, self.frame(parts), False, counts, math.inf)
        if counts.decoded != len(self.valid):
            raise FoundError(f"{self.codec!r} does not decode what it has encoded: {counts.messages}")
        return self

    @property
    def honest(self) -> dict[str, int]:
        """The fields of a valid header, without the lengths of meta and body."""
        numbers = {"spec": self.codec.fingerprint(), "step": STEP, "bucket": self.layout.id}
        return {"flags": 0, "zero": 0, "numel": self.layout.numel, **numbers}

    def frame(self, parts: Parts, **fields: int) -> Bytes:
        """A sealed frame; fields of the header can be given other values before it is sealed."""
        f = {**self.honest, "meta": len(parts.meta), "body": len(parts.body), **fields}
        order = ("flags", "meta", "zero", "spec", "step", "bucket", "numel", "body")
        head = frames._FIELDS.pack(frames.MAGIC, frames.VERSION, *(f[name] for name in order))
        frame = np.concatenate([np.zeros(HEADER_NBYTES, dtype=np.uint8), parts.joined])
        tail = frames._CHECKSUM.pack(frames._checksum(head, torch.from_numpy(frame)))
        frame[:HEADER_NBYTES] = np.frombuffer(head + tail, dtype=np.uint8)
        return frame


def _vectors(numel: int) -> Iterator[Tensor]:
    yield from (laplace(numel)(rank, 0) for rank in range(2))
    yield torch.zeros(numel)
    for name in ("constant", "huge", "denormal", "one non-zero"):
        if numel <= DEGENERATE[name].numel():
            yield DEGENERATE[name][-numel:].clone()


def _state(codec: Compressor, layout: Layout) -> State:
    state = codec.init(layout, 3)
    state["_positions"] = torch.arange(0, layout.numel, 3, dtype=torch.int32)  # as VGC would have selected
    state["_offsets"] = torch.tensor(layout.offsets)
    return state


# ---- mutations ------------------------------------------------------------------------------------


def mutated(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    """Some bytes that began as a valid body: one to three changes, each of any kind."""
    for _ in range(rng.integers(1, 4)):
        body = _CHANGES[rng.integers(len(_CHANGES))](body, other, numel, rng)
    return body


def _flip(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    body = body.copy()
    if len(body):
        places = rng.integers(0, len(body), rng.integers(1, 5))
        body[places] ^= (1 << rng.integers(0, 8, len(places))).astype(np.uint8)
    return body


def _bytes(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    body = body.copy()
    if len(body):
        start = rng.integers(len(body))
        stop = start + rng.integers(1, 16)
        body[start:stop] = rng.choice(np.array([0, 1, 0x7F, 0x80, 0xFF], dtype=np.uint8))
    return body


def _number(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    """Write an extreme count, length or float at a place of a number, mostly at the front."""
    near = [0, 1, 2, numel - 1, numel, numel + 1, len(body), len(body) - 16, len(body) + 8]
    far = [2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - numel, 2**61 + 1]
    value = int(rng.choice(np.array([n % 2**64 for n in (*near, *far)], dtype=np.uint64)))
    kind = rng.integers(4)
    if kind == 0:
        raw = struct.pack("<f", float(rng.choice([np.nan, np.inf, -np.inf, -0.0, 3e38, -3e38, 1e-45, -1.0])))
    else:
        raw = struct.pack("<Q", value)[: (8, 4, 2)[kind - 1]]
    slots = max(1, min(len(body), 64 if rng.random() < 0.7 else len(body)) // len(raw))
    start = int(rng.integers(slots)) * len(raw)
    body = body.copy()
    body[start : start + len(raw)] = np.frombuffer(raw, dtype=np.uint8)[: max(0, len(body) - start)]
    return body


def _nudge(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    """Change one of the 8-byte numbers at the front a little: lengths that nearly fit."""
    body = body.copy()
    slots = min(len(body) // 8, 12)
    if slots:
        words = body[: 8 * slots].view(np.int64)
        place = rng.integers(slots)
        words[place : place + 1] += rng.choice([1, 2, 7, 8, -1, -2, -8])  # an array's numbers wrap around
    return body


def _truncate(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    return body[: rng.integers(len(body) + 1)].copy()


def _extend(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    return np.concatenate([body, rng.integers(0, 256, rng.integers(1, 40), dtype=np.uint8)])


def _splice(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    """The beginning of one valid body and the end of another."""
    place = int(rng.integers(len(body) + 1)) & (~7 if rng.random() < 0.5 else ~0)
    return np.concatenate([body[:place], other[place if rng.random() < 0.7 else rng.integers(len(other) + 1) :]])


def _delete(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    start = rng.integers(len(body) + 1)
    return np.concatenate([body[:start], body[start + rng.integers(1, 32) :]])


def _repeat(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    start = rng.integers(len(body) + 1)
    return np.concatenate([body[: start + rng.integers(1, 32)], body[start:]])


def _noise(body: Bytes, other: Bytes, numel: int, rng: np.random.Generator) -> Bytes:
    """Random bytes after a valid front, or throughout."""
    keep = int(rng.choice([0, 8, 16, 32])) if len(body) else 0
    return np.concatenate([body[:keep], rng.integers(0, 256, max(0, len(body) - keep), dtype=np.uint8)])


_CHANGES = (_flip, _bytes, _number, _number, _nudge, _truncate, _extend, _splice, _delete, _repeat, _noise)


def hostile(target: Target, rng: np.random.Generator) -> tuple[Bytes, bool]:
    """A mutated frame, and whether it must be rejected before decoding."""
    parts, other = (target.valid[i] for i in rng.integers(0, len(target.valid), 2))
    kind = rng.random()
    if kind < 0.85:
        frame = target.frame(_mutated_parts(parts, other, target.layout.numel, rng))
        return frame, len(frame) > frames.max_frame_nbytes(target.layout)
    if kind < 0.93:
        return _lying(target, parts, rng)
    frame = target.frame(parts)
    changed = mutated(frame, target.frame(other), target.layout.numel, rng)
    same = len(changed) == len(frame) and bool((changed == frame).all())
    return changed, not same


def _mutated_parts(parts: Parts, other: Parts, numel: int, rng: np.random.Generator) -> Parts:
    """Meta, body or both are mutated; most codecs have a short meta, in which every byte counts."""
    which = rng.integers(3)
    meta, body = parts.meta, parts.body
    if which != 0 and len(meta):
        meta = mutated(meta, other.meta, numel, rng)
    if which != 1 or not len(parts.meta):
        body = mutated(body, other.body, numel, rng)
    return Parts(meta, body)


def _lying(target: Target, parts: Parts, rng: np.random.Generator) -> tuple[Bytes, bool]:
    """A wrong header with a valid checksum."""
    honest = {**target.honest, "meta": len(parts.meta), "body": len(parts.body)}
    name = str(rng.choice(sorted(honest)))
    near = honest[name] + int(rng.choice([-1, 1, 8]))
    value = int(rng.choice(np.array([near % 2**64, 0, 2**31, 2**63, 2**64 - 1], dtype=np.uint64)))
    value %= {"flags": 2**16, "meta": 2**32, "zero": 2**32}.get(name, 2**64)
    if name == "flags":
        value &= ~frames.NONFINITE  # a wrong flag cannot be detected
    frame = target.frame(parts, **{name: value})
    if name == "meta":  # another length in as many words: only the decoder can tell
        return frame, padded(value) != padded(honest[name])
    return frame, value != honest[name]


# ---- the judge ------------------------------------------------------------------------------------


def judge(target: Target, frame: Bytes, must_be_refused: bool, counts: Counts, seconds: float = SECONDS) -> None:
    """Open and decode one frame; raise FoundError for anything but a rejection with a message, or a result."""
    target.guarded.zero_()
    began = time.thread_time()
    try:
        step = Step(target.layout, STEP)
        payload = frames.open_frame(torch.from_numpy(frame), target.codec.fingerprint(), step)
    except frames.FrameError as error:
        counts.refused += 1
        _note(error, counts)
    else:
        if must_be_refused and not _is_valid(target, frame):
            raise FoundError("a frame with a wrong header or checksum was opened")
        _decode(target, payload, counts)
    took = time.thread_time() - began
    counts.slowest = max(counts.slowest, took)
    if took > seconds:
        raise FoundError(f"took {took:.1f} s of processor time")


def _is_valid(target: Target, frame: Bytes) -> bool:
    """Whether this frame has a valid payload: a spliced frame may happen to be valid."""
    tail = frame[HEADER_NBYTES:]
    return any(np.array_equal(parts.joined, tail) for parts in target.valid)


def _decode(target: Target, payload: Payload, counts: Counts) -> None:
    codec, each = target.codec, isinstance(target.codec, PerTensor)
    together = _refused(lambda: decode_sum(codec, [payload] * 2, 0.5, target.out, target.state), counts)
    if isinstance(codec, Transformed) or adds_in_place(codec):
        refused = _refused(lambda: accumulate(codec, payload, target.acc), counts)
        # PerTensor decodes tensor by tensor: when the third is refused, two have been added, and the step has failed.
        # And a payload that is decoded by itself is not compared with the lengths of the bucket's tensors.
        if refused and bool(target.acc.any()) and not each:
            raise FoundError("the accumulator was changed by a payload that was then refused")
        if together != refused and not (each and together):
            raise FoundError(f"refused by itself: {refused}; together with others: {together}")
    target.acc.zero_()
    target.out.zero_()
    if bool(target.guarded.any()):
        raise FoundError("memory outside the accumulator was written")
    counts.rejected += together
    counts.decoded += not together


def _refused(decode: Callable[[], object], counts: Counts) -> bool:
    try:
        decode()
    except ValueError as error:
        _note(error, counts)
        return True
    except Exception as error:
        raise FoundError(f"{type(error).__name__}: {error}") from error
    return False


def _note(error: ValueError, counts: Counts) -> None:
    text = str(error)
    if not text:
        raise FoundError("an error without a text") from error
    counts.messages.add("".join(c for c in text if c.isalpha() or c == " ")[:60])


def targets_of(codec: Compressor) -> list[Target]:
    """Targets for buckets of several sizes; the last two have the sizes of real ones."""
    return [Target.of(codec, layout) for layout in (*SMALL, LARGE, LARGEST)]


def fuzz(codec: Compressor, count: int, seed: int, seconds: float = SECONDS) -> Counts:
    """Try ``count`` mutated frames of one codec, over buckets of several sizes.

    Raises:
        FoundError: at the first finding; its note says how to repeat it.
    """
    rng = np.random.default_rng([seed, codec.fingerprint()])
    *small, large, largest = targets_of(codec)
    counts = Counts()
    for i in range(count):
        every = round(1 / SHARE_OF_LARGE)
        is_large = i % every == 1
        real = largest if i // every % 4 == 3 else large
        target = real if is_large else small[0 if rng.random() < 0.6 else rng.integers(len(small))]
        frame, must_be_refused = hostile(target, rng)
        counts.large += is_large
        try:
            judge(target, frame, must_be_refused, counts, seconds)
        except FoundError as error:
            error.add_note(_how_to_repeat(target, seed, i, frame))
            raise
        if i % 1000 == 0:
            faulthandler.dump_traceback_later(HANGS, exit=True)
    faulthandler.cancel_dump_traceback_later()
    return counts


def _how_to_repeat(target: Target, seed: int, i: int, frame: Bytes) -> str:
    shown = bytes(frame[:4096]).hex() + ("..." if len(frame) > 4096 else "")
    return f"{target.codec!r}, seed {seed}, frame {i} of {target.layout.numel} elements: {shown}"


@contextmanager
def limited_memory(headroom: int = HEADROOM) -> Iterator[None]:
    """Inside the block the process may map only so many bytes more than it has now: a huge allocation fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + headroom, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---- the command ----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Fuzz all codecs, or some, and print a table; returns 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tersegrad.lab.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000, help="mutated frames in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--codecs", nargs="*", help="expressions; default: every codec")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = {text: parse(text) for text in options.codecs} if options.codecs else dict(codecs())
    each = -(-options.frames // len(chosen))
    for codec in chosen.values():
        assert isinstance(codec, Compressor)
        fuzz(codec, 20, options.seed, seconds=math.inf)  # compiles the kernels, for large buckets too
    with limited_memory():
        return _report(chosen, each, options.seed)  # type: ignore[arg-type]


def _report(chosen: dict[str, Compressor], each: int, seed: int) -> int:
    total, found = Counts(), 0
    print(f"{'codec':56} {'frames':>8} {'refused':>8} {'rejected':>8} {'decoded':>8} {'texts':>5} {'slowest':>9}")
    for name, codec in chosen.items():
        try:
            counts = fuzz(codec, each, seed)
        except FoundError as error:
            found += 1
            print(f"{name}: FOUND {error}\n  {error.__notes__[0]}", flush=True)
            continue
        print(
            f"{name[:56]:56} {counts.frames:8} {counts.refused:8} {counts.rejected:8} {counts.decoded:8} "
            f"{len(counts.messages):5} {1000 * counts.slowest:6.1f} ms",
            flush=True,
        )
        total.refused, total.rejected = total.refused + counts.refused, total.rejected + counts.rejected
        total.decoded, total.large = total.decoded + counts.decoded, total.large + counts.large
    print(
        f"{total.frames} frames of {len(chosen)} codecs ({total.large} of them of {LARGE.numel} or {LARGEST.numel} "
        f"elements), seed {seed}: {total.refused} refused by the frame's checks, {total.rejected} by decoders, "
        f"{total.decoded} decoded; {found} codecs with a finding."
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
