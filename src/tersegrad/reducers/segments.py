"""A bucket in segments, for exchanges that reduce every segment at another worker."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tersegrad import wire
from tersegrad.core import HEADER_NBYTES, Bucket, Comm, Compressor, Payload, Pending, State, later, mix_seed, scratch


@dataclass(frozen=True)
class Cut:
    """Into how many segments a bucket is cut, and what they are encoded with."""

    compressor: Compressor
    count: int
    seed: int  # the same on two workers only if they shall draw the same random numbers

    def init(self, bucket: Bucket) -> State:
        """One state of the compressor per segment, under the names of the tensors that the segment touches."""
        segments: State = {}
        for i, (part, _, _) in enumerate(stretches(bucket, self.count)):
            segments[str(i)] = {"names": list(part.names), "layout": part.id, "inner": self._fresh(i, part)}
        return {"segments": segments}

    def segments(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, spec: int) -> "list[Segment]":
        """The segments of this step."""
        if state.get("_cut_for") != bucket.id:
            state["_cut_for"], state["_stretches"] = bucket.id, stretches(bucket, self.count)
        made = []
        for i, (part, start, stop) in enumerate(state["_stretches"]):
            part.step = bucket.step
            inner = self._inner(i, part, state["segments"][str(i)])
            made.append(Segment(self.compressor, spec, part, inner, state, x[start:stop], out[start:stop]))
        return made

    def _inner(self, i: int, part: Bucket, saved: State) -> State:
        """The compressor's state. One that comes from another cutting of buckets is of no use here, and is replaced."""
        if saved["layout"] != part.id:
            later(saved, layout=part.id, inner=self._fresh(i, part))
            saved = saved["_next"]
        inner: State = saved["inner"]
        return inner

    def _fresh(self, i: int, part: Bucket) -> State:
        return self.compressor.init(part, mix_seed(self.seed, i)) if part.numel else {}


def stretches(bucket: Bucket, count: int) -> list[tuple[Bucket, int, int]]:
    """The bucket in ``count`` stretches of the same length (to one element): who lives in each, its start and end.

    A tensor that is cut is there with what lies in the stretch, flat.

    >>> [(part.names, part.sizes, start, stop) for part, start, stop in stretches(Bucket(("w", "b"), ((7,), (3,))), 2)]
    [(('w',), (5,), 0, 5), (('w', 'b'), (2, 3), 5, 10)]
    """
    ends = [bucket.numel * i // count for i in range(count + 1)]
    return [(_part(bucket, start, stop), start, stop) for start, stop in pairwise(ends)]


def _part(bucket: Bucket, start: int, stop: int) -> Bucket:
    names, shapes = [], []
    for name, shape, begin, end in zip(bucket.names, bucket.shapes, bucket.offsets, bucket.offsets[1:], strict=False):
        inside = min(end, stop) - max(begin, start)
        if inside > 0:
            names.append(name)
            shapes.append(shape if inside == end - begin else (inside,))
    part = Bucket(tuple(names), tuple(shapes), bucket.step, bucket.seed)
    part.id = mix_seed(bucket.id, start, stop)  # two stretches of one tensor look alike otherwise
    return part


class Term(NamedTuple):
    """``scale * decoded(payload)``, and whose payload it is."""

    payload: Payload
    scale: float
    rank: int


@dataclass
class Segment:
    """One stretch of the bucket in one step. An empty one is never encoded nor sent."""

    compressor: Compressor
    spec: int  # fingerprint, for the frames
    bucket: Bucket
    state: State  # the compressor's
    memory: State  # for scratch that all segments share
    x: Tensor
    out: Tensor

    @property
    def room(self) -> int:
        """No frame of this segment is longer."""
        return HEADER_NBYTES + wire.max_body_nbytes(self.bucket) if self.bucket.numel else 0

    def encode(self) -> Payload:
        """The payload of ``x``."""
        if self.bucket.numel:
            return self.compressor.encode(self.x, self.state)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.x.device)
        return Payload(nothing, 0, memory=nothing)

    def seal(self, payload: Payload) -> Tensor:
        """The frame of a payload that was encoded here."""
        if not self.bucket.numel:
            return payload.frame
        if payload.nbytes > self.room:
            raise ValueError(
                f"{self.compressor!r} made {payload.nbytes} bytes of {payload.numel} elements; at most {self.room} "
                "can be needed."
            )
        return wire.seal(payload, self.spec, self.bucket)

    def open(self, message: Tensor, rank: int) -> Payload:
        """The payload in a message that ``rank`` sent; the message may be followed by anything."""
        if not self.bucket.numel:
            return self.encode()
        length = HEADER_NBYTES + wire.read_header(message, rank).length
        return wire.open_frame(message[:length], self.spec, self.bucket, rank)

    def add(self, terms: Iterable[Term]) -> None:
        """``x += sum of terms``."""
        if not self.bucket.numel:
            for _ in terms:  # nothing to add, but messages that are to be waited for
                pass
        elif _sums_in_place(self.compressor):
            self._accumulate(terms, self.x)
        else:
            self.x.add_(self._sum(terms, scratch(self.memory, "sum", self.x.numel(), torch.float32, self.x.device)))

    def decode(self, payload: Payload, rank: int) -> None:
        """``out = decoded(payload)``; the payload is that rank's."""
        if self.bucket.numel:
            self._sum([Term(payload, 1.0, rank)], self.out)

    def remove(self, payload: Payload) -> None:
        """``x -= decoded(payload)``."""
        if self.bucket.numel:
            self.compressor.remove(payload, self.x, self.state)

    def _sum(self, terms: Iterable[Term], total: Tensor) -> Tensor:
        """``total = sum of terms``."""
        acc = self.compressor.accumulator(total, self.state)
        self._accumulate(terms, acc)
        self.compressor.finish(acc, total, self.state)
        return total

    def _accumulate(self, terms: Iterable[Term], acc: Tensor) -> None:
        for payload, scale, rank in terms:
            try:
                self.compressor.accumulate(payload, acc, scale)
            except ValueError as error:
                raise wire.FrameError(f"rank {rank} sent a frame that cannot be decoded: {error}") from error


def _sums_in_place(compressor: Compressor) -> bool:
    """Whether payloads may be added straight to a vector: the compressor has no other domain to sum in."""
    kind = type(compressor)
    return kind.accumulator is Compressor.accumulator and kind.finish is Compressor.finish


def receiving(segment: Segment, key: str) -> Tensor:
    """Where a frame of this segment can arrive."""
    return wire.receiving(segment.memory, key, segment.room, segment.x.device)


def arriving(under_way: list[Pending], expected: list[Segment], comm: Comm) -> Iterator[tuple[int, Payload]]:
    """What the workers 1, 2, ... places before this one sent, one after the other, with their ranks.

    A wrong frame is an error only once all other messages have come and gone. gloo forgets what a rank that gives up
    has not yet sent: others would wait for that in vain, and never come to the wrong frame themselves.
    """
    messages = iter(under_way)
    for by, (message, segment) in enumerate(zip(messages, expected, strict=True), start=1):
        rank = (comm.rank - by) % comm.size
        try:
            payload = segment.open(message.wait(), rank)
        except wire.FrameError:
            with suppress(RuntimeError, ValueError):  # a second thing that is wrong must not hide the first
                for other in messages:
                    other.wait()
            raise
        yield rank, payload
