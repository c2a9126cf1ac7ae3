"""Segments of a bucket, for reducers in which every worker reduces one segment."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tersegrad.comm import frame as frames
from tersegrad.comm.exchange import receive_buffer
from tersegrad.core import (
    UNSIGNED,
    Comm,
    Compressor,
    Layout,
    Payload,
    Pending,
    Signer,
    State,
    Step,
    accumulate,
    adds_in_place,
    decode_sum,
    mix_seed,
    scratch,
    stage,
    staged,
    subtract,
)


class Place(NamedTuple):
    """The layout of a segment, and where it begins and ends in the bucket."""

    layout: Layout
    start: int
    stop: int


def places(layout: Layout, count: int, state: State, whole_rows: bool = False) -> list[Place]:
    """Split a bucket into ``count`` segments of equal length (to within one element); cached in the state's scratch.

    ``whole_rows``: a matrix or a convolution is split between two of its rows, the nearest ones.

    >>> [(p.layout.names, p.layout.sizes, p.start, p.stop) for p in places(Layout(("w", "b"), ((7,), (3,))), 2, {})]
    [(('w',), (5,), 0, 5), (('w', 'b'), (2, 3), 5, 10)]
    >>> [p.layout.shapes for p in places(Layout(("w",), ((7, 3, 2),)), 2, {}, whole_rows=True)]
    [((4, 3, 2),), ((3, 3, 2),)]
    """
    if state.get("_places_of") != layout.id:
        ends = [layout.numel * i // count for i in range(count + 1)]
        if whole_rows:
            ends = [_between_rows(layout, end) for end in ends]
        state["_places"] = [Place(layout.slice(start, stop), start, stop) for start, stop in pairwise(ends)]
        state["_places_of"] = layout.id
    found: list[Place] = state["_places"]
    return found


def _between_rows(layout: Layout, place: int) -> int:
    """The boundary of two rows that is nearest to a place in a bucket."""
    for shape, begin, end in zip(layout.shapes, layout.offsets, layout.offsets[1:], strict=False):
        if begin <= place < end and len(shape) > 1:
            row = math.prod(shape[1:])
            return begin + round((place - begin) / row) * row
    return place


@dataclass(frozen=True)
class Segmentation:
    """The number of segments of a bucket, and their compressor."""

    compressor: Compressor
    count: int
    seed: int  # equal on all workers only if they must draw the same random numbers
    signer: Signer = UNSIGNED

    @property
    def whole_rows(self) -> bool:
        """What is transformed is transformed row by row: a row in two segments would be two pieces of nothing."""
        return not adds_in_place(self.compressor)

    def init(self, layout: Layout) -> State:
        """One state of the compressor per segment, with the names of the tensors in the segment."""
        segments: State = {}
        for i, (part, _, _) in enumerate(places(layout, self.count, {}, self.whole_rows)):
            segments[str(i)] = {"names": list(part.names), "layout": part.id, "inner": self._fresh(i, part)}
        return {"segments": segments}

    def segments(self, step: Step, x: Tensor, out: Tensor, state: State, spec: int) -> "list[Segment]":
        """The segments of ``x`` and ``out``, with the compressor's states."""
        made = []
        for i, (part, start, stop) in enumerate(places(step.layout, self.count, state, self.whole_rows)):
            inner = self._inner(i, part, state["segments"][str(i)])
            ours = x[start:stop], out[start:stop]
            made.append(Segment(self.compressor, spec, step.on(part), inner, state, *ours, self.signer))
        return made

    def _inner(self, i: int, part: Layout, saved: State) -> State:
        """The compressor's state; a fresh one if the saved one belongs to a different split of the tensors."""
        if saved["layout"] != part.id:
            stage(saved, layout=part.id, inner=self._fresh(i, part))
            saved = staged(saved)
        inner: State = saved["inner"]
        return inner

    def _fresh(self, i: int, part: Layout) -> State:
        return self.compressor.init(part, mix_seed(self.seed, i)) if part.numel else {}


class Term(NamedTuple):
    """``scale * decoded(payload)``, and what people call the rank that sent the payload."""

    payload: Payload
    scale: float
    rank: int


@dataclass
class Segment:
    """One segment of the bucket in one step. An empty one is neither encoded nor sent."""

    compressor: Compressor
    spec: int  # fingerprint, for the frame header
    step: Step
    state: State  # the compressor's
    memory: State  # scratch shared by all segments
    x: Tensor
    out: Tensor
    signer: Signer

    @property
    def numel(self) -> int:
        return self.step.layout.numel

    @property
    def capacity(self) -> int:
        """The largest number of bytes of a frame of this segment."""
        return frames.max_frame_nbytes(self.step.layout) if self.numel else 0

    def fill(self) -> None:
        """Make ``x``; there is nothing to do where it holds the gradient itself."""

    def empty(self) -> None:
        """Use ``out``, which has just been decoded; there is nothing to do where it is the mean itself."""

    def encode(self) -> Payload:
        """The payload of ``x``."""
        if self.numel:
            return self.compressor.encode(self.x, self.state)
        return Payload(torch.empty(0, dtype=torch.uint8, device=self.x.device), 0)

    def seal(self, payload: Payload) -> Tensor:
        """The frame of a payload."""
        if not self.numel:
            return payload.body
        if payload.nbytes > self.capacity:
            raise ValueError(
                f"{self.compressor!r} made {payload.nbytes} bytes of {payload.numel} elements; at most {self.capacity} "
                "can be needed."
            )
        return frames.seal(payload, self.spec, self.step, self.signer)

    def receive_buffer(self, key: str) -> Tensor:
        """A buffer that a frame of this segment can be received into."""
        return receive_buffer(self.memory, key, self.capacity)

    def open(self, message: Tensor, rank: int) -> Payload:
        """The payload in a message that ``rank`` sent; bytes after the frame are ignored."""
        if not self.numel:
            return self.encode()
        length = frames.read_header(message, rank).length
        return frames.open_frame(message[:length], self.spec, self.step, rank, self.signer)

    def add(self, terms: Iterable[Term]) -> None:
        """``x += sum of terms``. Terms are added as they arrive, unless they are summed in another domain."""
        if not self.numel:
            for _ in terms:  # nothing to add, but the messages must be received
                pass
        elif adds_in_place(self.compressor):
            for payload, scale, rank in terms:
                with frames.blaming(rank):
                    accumulate(self.compressor, payload, self.x, scale)
        else:
            self._add_transformed(list(terms))

    def _add_transformed(self, terms: list[Term]) -> None:
        """Sum the terms, which all have the same scale, in the compressor's domain; then transform back once."""
        if terms:
            assert len({term.scale for term in terms}) == 1
            total = scratch(self.memory, "sum", self.x.numel(), torch.float32, self.x.device)
            with frames.blaming(*(term.rank for term in terms)):
                decode_sum(self.compressor, [term.payload for term in terms], terms[0].scale, total, self.state)
            self.x.add_(total)

    def decode(self, payload: Payload, rank: int) -> None:
        """``out = decoded(payload)``; ``rank`` sent the payload."""
        if self.numel:
            with frames.blaming(rank):
                decode_sum(self.compressor, [payload], 1.0, self.out, self.state)

    def subtract(self, payload: Payload) -> None:
        """``x -= decoded(payload)``."""
        if self.numel:
            subtract(self.compressor, payload, self.x, self.state)


def announce(segments: list[Segment], result: Payload, comm: Comm) -> Callable[[], None]:
    """Send this worker's result for its own segment to all; the returned function decodes all results."""
    own = segments[comm.rank]
    frame = own.seal(result)
    others = [segments[(comm.rank - by) % comm.size] for by in range(1, comm.size)]
    under_way = [
        comm.start_shift(frame, theirs.receive_buffer(f"from {by}"), by) for by, theirs in enumerate(others, start=1)
    ]

    def finish() -> None:
        own.decode(result, comm.name(comm.rank))
        for rank, payload in arriving(under_way, others, comm):
            segments[rank].decode(payload, comm.name(rank))

    return finish


def arriving(under_way: list[Pending], expected: list[Segment], comm: Comm) -> Iterator[tuple[int, Payload]]:
    """The payloads of the workers 1, 2, ... places before this one, in this order, with their ranks.

    A wrong frame is raised as an error only after all other messages were sent and received. gloo drops the unsent
    messages of a rank that fails: other ranks would wait for them forever and never see the wrong frame themselves.
    """
    messages = iter(under_way)
    for by, (message, segment) in enumerate(zip(messages, expected, strict=True), start=1):
        rank = (comm.rank - by) % comm.size
        try:
            payload = segment.open(message.wait(), comm.name(rank))
        except frames.FrameError:
            with suppress(RuntimeError, ValueError):  # a second error must not hide the first
                for other in messages:
                    other.wait()
            raise
        yield rank, payload
