"""Hostile frames: valid ones of every codec, mutated by the million, must be refused with a text or decoded.

    python -m tersegrad.lab.fuzz --frames 1000000 --seed 0

A mutated body is sealed again, so that it comes past the checksum to the decoder; a mutated header is sealed again or
not. What must never happen: any other error than a ValueError with a text, a write outside the accumulator, a large
allocation (the address space is limited), or a frame that takes seconds. Everything follows from the seed.
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

from tersegrad.comm.torch import frame
from tersegrad.compressors import PerTensor
from tersegrad.core import HEADER_NBYTES, Bucket, Compressor, Payload, State
from tersegrad.specs.parse import parse, registry
from tersegrad.testing.inputs import DEGENERATE, laplace

GUARD = 32  # floats on both sides of an accumulator that nobody may write to
HEADROOM = 512 << 20  # bytes that decoding may ask for beyond what is there at the start: far above any honest need
SECONDS = 5.0  # of processor time that no single frame may take; an honest one of this size takes a millisecond
HANGS = 300.0  # seconds without progress after which the process says where it is, and ends

Bytes = np.ndarray  # of uint8

BUCKETS = (
    Bucket(("a.weight", "a.bias", "b.weight"), ((37, 20), (20,), (3, 5, 3, 3)), seed=7),
    Bucket(("a.bias", "b.bias"), ((5,), (64,)), seed=7),
    Bucket(("x",), ((1,),), seed=7),
)


class FoundError(AssertionError):
    """A frame that did what no frame may do."""


@dataclass
class Counts:
    """What became of the mutated frames of one codec."""

    refused: int = 0  # by the frame's own checks
    rejected: int = 0  # by the decoder
    decoded: int = 0
    slowest: float = field(default=0.0, compare=False)  # seconds of processor time
    messages: set[str] = field(default_factory=set)  # the different texts, without their numbers

    @property
    def frames(self) -> int:
        """All of them."""
        return self.refused + self.rejected + self.decoded


def codecs() -> dict[str, Compressor]:
    """Every registered compressor's examples, and the codecs that reducers keep to themselves."""
    classes = [cls for cls in registry().values() if issubclass(cls, Compressor)]
    found = [parse(text) for cls in classes for text in cls.examples or (f"{cls.__name__}()",)]
    private = ("VGC()", "VGC(tau=0.1)", "VGC(layout='words')", "VGC(tau=0.1, layout='words')")
    found += [parse(text)._exchange.compressor for text in private]  # type: ignore[attr-defined]
    return {repr(codec): codec for codec in found if isinstance(codec, Compressor)}


# ---- valid frames ---------------------------------------------------------------------------------


@dataclass
class Target:
    """One codec and one bucket: valid bodies, and guarded places to decode into, by itself and with others."""

    codec: Compressor
    bucket: Bucket
    bodies: list[Bytes]
    state: State
    guarded: Tensor
    acc: Tensor
    out: Tensor

    @staticmethod
    def of(codec: Compressor, bucket: Bucket) -> "Target":
        """With the bodies of some vectors."""
        state = _state(codec, bucket)
        bodies = []
        for x in _vectors(bucket.numel):
            payload = codec.encode(x, state)
            if payload.finite:
                bodies.append(payload.body.numpy().copy())
        length = codec.accumulator(torch.empty(bucket.numel), state).numel()
        guarded = torch.zeros(length + bucket.numel + 3 * GUARD)
        acc, out = guarded[GUARD : GUARD + length], guarded[length + 2 * GUARD : -GUARD]
        return Target(codec, bucket, bodies, state, guarded, acc, out)

    def frame(self, body: Bytes, **fields: int) -> Bytes:
        """A sealed frame of this body; fields of the header can be given other values before it is sealed."""
        numel, length = fields.get("numel", self.bucket.numel), fields.get("length", len(body))
        step, bucket = fields.get("step", self.bucket.step), fields.get("bucket", self.bucket.id)
        spec, flags = fields.get("spec", self.codec.fingerprint()), fields.get("flags", 0)
        head = frame._FIELDS.pack(frame.MAGIC, frame.VERSION, flags, spec, step, bucket, numel, length)
        tail = frame._CHECKSUM.pack(frame._checksum(head, torch.from_numpy(body)))
        return np.concatenate([np.frombuffer(head + tail, dtype=np.uint8), body])


def _vectors(numel: int) -> Iterator[Tensor]:
    yield from (laplace(numel)(rank, 0) for rank in range(2))
    yield torch.zeros(numel)
    for name in ("constant", "huge", "denormal", "one non-zero"):
        if numel <= DEGENERATE[name].numel():
            yield DEGENERATE[name][-numel:].clone()


def _state(codec: Compressor, bucket: Bucket) -> State:
    state = codec.init(bucket, 3)
    state["_positions"] = torch.arange(0, bucket.numel, 3, dtype=torch.int32)  # what VGC would have found
    state["_offsets"] = torch.tensor(bucket.offsets)
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
    """A count, a length or a float of the kind that breaks things, where a number may stand; mostly in front."""
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
    """One of the 8-byte numbers in front, a little more or less: lengths that nearly fit."""
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
    """Random bytes behind a valid front, or throughout."""
    keep = int(rng.choice([0, 8, 16, 32])) if len(body) else 0
    return np.concatenate([body[:keep], rng.integers(0, 256, max(0, len(body) - keep), dtype=np.uint8)])


_CHANGES = (_flip, _bytes, _number, _number, _nudge, _truncate, _extend, _splice, _delete, _repeat, _noise)


def hostile(target: Target, rng: np.random.Generator) -> tuple[Bytes, bool]:
    """A mutated frame, and whether it must be refused before any decoder sees it."""
    body, other = (target.bodies[i] for i in rng.integers(0, len(target.bodies), 2))
    kind = rng.random()
    if kind < 0.85:
        body = mutated(body, other, target.bucket.numel, rng)
        return target.frame(body), len(body) > frame.max_body_nbytes(target.bucket)
    if kind < 0.93:  # a header that lies, with a checksum that is right
        name = str(rng.choice(["numel", "length", "step", "bucket", "spec", "flags"]))
        honest = {"numel": target.bucket.numel, "length": len(body), "step": target.bucket.step}
        honest |= {"bucket": target.bucket.id, "spec": target.codec.fingerprint()}
        near = honest.get(name, 0) + int(rng.choice([-1, 1, 8]))
        value = int(rng.choice(np.array([near % 2**64, 0, 2**31, 2**63, 2**64 - 1], dtype=np.uint64)))
        if name == "flags":
            value = 2 + value % 2**15 & ~1
        return target.frame(body, **{name: value}), value != honest.get(name, 0)
    frame = target.frame(body)
    changed = mutated(frame, target.frame(other), target.bucket.numel, rng)
    same = len(changed) == len(frame) and bool((changed == frame).all())
    return changed, not same


# ---- the judge ------------------------------------------------------------------------------------


def judge(target: Target, frame: Bytes, must_be_refused: bool, counts: Counts, seconds: float = SECONDS) -> None:
    """Opens and decodes one frame; raises FoundError for anything but a refusal with a text, or a result."""
    target.guarded.zero_()
    began = time.thread_time()
    try:
        payload = frame.open_frame(torch.from_numpy(frame), target.codec.fingerprint(), target.bucket)
    except frame.FrameError as error:
        counts.refused += 1
        _note(error, counts)
    else:
        if must_be_refused and bool((frame[HEADER_NBYTES:] != _known(target, frame)).any()):
            raise FoundError("a frame with a wrong header or checksum was opened")
        _decode(target, payload, counts)
    took = time.thread_time() - began
    counts.slowest = max(counts.slowest, took)
    if took > seconds:
        raise FoundError(f"took {took:.1f} s of processor time")


def _known(target: Target, frame: Bytes) -> Bytes:
    """A valid body that this frame holds, if there is one: spliced frames may turn out to be valid ones."""
    body = frame[HEADER_NBYTES:]
    for valid in target.bodies:
        if len(valid) == len(body) and bool((valid == body).all()):
            return valid
    return ~body


def _decode(target: Target, payload: Payload, counts: Counts) -> None:
    refused = _refused(lambda: target.codec.accumulate(payload, target.acc), counts)
    # PerTensor finds out at the third tensor that it cannot be decoded when two have been added: the step is over then.
    if refused and bool(target.acc.any()) and not isinstance(target.codec, PerTensor):
        raise FoundError("the accumulator was changed by a payload that was then refused")
    together = _refused(lambda: target.codec.sum_decoded([payload] * 2, 0.5, target.out, target.state), counts)
    if together != refused:
        raise FoundError(f"refused by itself: {refused}; and together with others: {together}")
    target.acc.zero_()
    target.out.zero_()
    if bool(target.guarded.any()):
        raise FoundError("memory outside the accumulator was written")
    counts.rejected += refused
    counts.decoded += not refused


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


def fuzz(codec: Compressor, frames: int, seed: int, seconds: float = SECONDS) -> Counts:
    """So many mutated frames of one codec, over buckets of several sizes."""
    rng = np.random.default_rng([seed, codec.fingerprint()])
    targets = [Target.of(codec, bucket) for bucket in BUCKETS]
    counts = Counts()
    for i in range(frames):
        target = targets[0 if rng.random() < 0.6 else rng.integers(len(targets))]
        frame, must_be_refused = hostile(target, rng)
        try:
            judge(target, frame, must_be_refused, counts, seconds)
        except FoundError as error:
            error.add_note(f"{codec!r}, seed {seed}, frame {i} of {target.bucket.numel} elements: {bytes(frame).hex()}")
            raise
        if i % 1000 == 0:
            faulthandler.dump_traceback_later(HANGS, exit=True)
    faulthandler.cancel_dump_traceback_later()
    return counts


@contextmanager
def limited_memory(headroom: int = HEADROOM) -> Iterator[None]:
    """Within, the process may map only so many bytes more than it has now: a huge allocation fails."""
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
    """Fuzzes all codecs, or some, and prints what became of the frames; 1 if something was found."""
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
        fuzz(codec, 20, options.seed, seconds=math.inf)  # compiles the kernels
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
        total.decoded, total.slowest = total.decoded + counts.decoded, max(total.slowest, counts.slowest)
    print(
        f"{total.frames} frames of {len(chosen)} codecs, seed {seed}: {total.refused} refused by the frame's checks, "
        f"{total.rejected} by decoders, {total.decoded} decoded; {found} codecs with a finding."
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
