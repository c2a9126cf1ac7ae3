"""Ring: segments go from worker to worker, each adds its part; traffic does not grow with the number of workers.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009; in compressed
form: Yu et al., "GradiVeQ", NeurIPS 2018.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.comm.frame import FrameError
from tersegrad.compressors.identity import aligned
from tersegrad.core import (
    Comm,
    Compressor,
    Finish,
    Layout,
    Payload,
    Pending,
    Reducer,
    State,
    Step,
    Summable,
    Vector,
    added,
    mix_seed,
    nothing_left,
    param,
    require,
)
from tersegrad.reducers._segments import Segment, Segmentation, Term


@dataclass(frozen=True, repr=False)
class Ring(Reducer):
    """Ring all-reduce of payloads; every worker adds its part to the partial sum, in compressed form if possible.

    With n workers and n segments, segment s starts at worker s as Q(x/n). Worker w computes P = received + x/n, sends
    Q(P) on, and keeps the error of its own hop: n (P - Q(P)). So n (Q(P) - received) is taken from its x; over the hops
    of a segment that telescopes to n Q(total), and the mean over workers is Q(total), which the last worker encodes
    once and all decode from the same bytes.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "Ring(Identity())",
        "Ring(BF16(), pieces=1)",
        "ErrorFeedback(Ring(TopK(0.1)))",
        "ErrorFeedback(Ring(FP16()))",
    )

    compressor: Compressor = param(doc="the codec of the payloads")
    pieces: int = param(2, "per segment: while one is sent the next is encoded; more => more overlap, more headers")

    def __post_init__(self) -> None:
        require(self, "compressor", Compressor, "Write e.g. Ring(BF16()).")
        if type(self.pieces) is not int or self.pieces < 1:
            raise ValueError(f"Ring(pieces={self.pieces!r}): a segment has at least one piece. Write pieces=2.")

    def _segmentation(self, layout: Layout, comm: Comm) -> Segmentation:
        # Payloads can be added only if all workers draw the same random numbers; all others need different ones.
        who = -1 if isinstance(self.compressor, Summable) else comm.rank
        return Segmentation(
            self.compressor, comm.size * self.pieces, mix_seed(layout.seed, layout.id, who), comm.signer
        )

    def init(self, layout: Layout, comm: Comm) -> State:
        """The compressor's states, one per piece of a segment."""
        return self._segmentation(layout, comm).init(layout)

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """n hops that add, then n that pass the totals on; the pieces of a segment are pipelined."""
        x = added(x)
        segments = self._segmentation(step.layout, comm).segments(step, x, out, state, self.fingerprint())
        go_round(segments, self.pieces, comm, keeps_rest=out is not x)
        return nothing_left


def go_round(
    segments: Sequence[Segment], pieces: int, comm: Comm, keeps_rest: bool, between: Callable[[], None] = nothing_left
) -> None:
    """All segments once round the ring to be added up, and once more to be passed on.

    Args:
        segments: ``pieces`` for every worker, in the order of the bucket. Each is filled when its first hop here is
            due, while the segment before travels; and emptied when its total is decoded, while the next one arrives.
        pieces: How many segments are under way at a time.
        comm: The ring.
        keeps_rest: Leave in ``x`` what was not sent.
        between: Called when all segments are filled, before totals are passed on.
    """
    lanes = [_Lane(f"lane {i}", segments[i::pieces], comm, keeps_rest) for i in range(pieces)]
    for hop in range(comm.size):
        for lane in lanes:
            lane.add(hop)
    between()
    for hop in range(comm.size):
        for lane in lanes:
            lane.pass_on(hop)


class _Lane:
    """One piece of every segment, going round the ring."""

    def __init__(self, name: str, segments: Sequence[Segment], comm: Comm, keeps_rest: bool):
        self.name = name
        self.segments = segments
        self.comm = comm
        self.keeps_rest = keeps_rest
        self._pending: Pending | None = None
        self._turn = 0  # which of two buffers is in use: one is sent while the other is filled

    def add(self, hop: int) -> None:
        """Add this worker's part to the segment that started ``hop`` workers before, and send it on."""
        segment = self._segment(-hop)
        segment.fill()
        mine = _mine(segment, self.comm)  # encoded while the partial sum is in flight
        received = self._receive(segment) if hop else None
        self._payload = mine.plus(received)
        if hop < self.comm.size - 1:
            self._send(segment.seal(self._payload), self._segment(-hop - 1))
        if self.keeps_rest:
            mine.leave_rest(received, self._payload)

    def pass_on(self, hop: int) -> None:
        """Decode one total while the next is in flight; the first is the one that was completed here."""
        segment = self._segment(1 - hop)
        payload = self._receive(segment) if hop else self._payload
        if hop < self.comm.size - 1:
            sealed = hop and segment.numel and not segment.signer  # a signature is its sender's alone
            self._send(payload.frame() if sealed else segment.seal(payload), self._segment(-hop))
        segment.decode(payload, _previous(self.comm) if hop else self.comm.name(self.comm.rank))
        segment.empty()

    def _segment(self, place: int) -> Segment:
        return self.segments[(self.comm.rank + place) % self.comm.size]

    def _send(self, frame: Tensor, expected: Segment) -> None:
        self._turn = 1 - self._turn
        self._pending = self.comm.start_shift(frame, expected.receive_buffer(f"{self.name} {self._turn}"))

    def _receive(self, segment: Segment) -> Payload:
        assert self._pending is not None
        return segment.open(self._pending.wait(), _previous(self.comm))


def _previous(comm: Comm) -> int:
    """What people call the worker that sends to this one."""
    return comm.name((comm.rank - 1) % comm.size)


class _Part(ABC):
    """One worker's part of one segment."""

    def __init__(self, segment: Segment, comm: Comm):
        self.segment = segment
        self.comm = comm

    @abstractmethod
    def plus(self, received: Payload | None) -> Payload:
        """The payload of the partial sum that was received plus this worker's part."""

    @abstractmethod
    def leave_rest(self, received: Payload | None, payload: Payload) -> None:
        """Leave in ``x`` the part that this worker's hop did not send."""


class _Recoded(_Part):
    """Decode the partial sum, add to it, and encode it again."""

    def __init__(self, segment: Segment, comm: Comm):
        super().__init__(segment, comm)
        segment.x.div_(comm.size)  # before adding, so that the sum stays in range

    def plus(self, received: Payload | None) -> Payload:
        """``Q(received + x)``; the sum is computed in ``x`` itself."""
        if received is not None:
            self.segment.add([Term(received, 1.0, _previous(self.comm))])
        return self.segment.encode()

    def leave_rest(self, received: Payload | None, payload: Payload) -> None:
        """``x = n (P - Q(P))``."""
        self.segment.subtract(payload)
        self.segment.x.mul_(self.comm.size)


class _Summed(_Part):
    """Encode before the partial sum arrives, and add to it in compressed form."""

    def __init__(self, segment: Segment, comm: Comm):
        super().__init__(segment, comm)
        self.payload = segment.encode()
        self.mine = self._body(self.payload)
        self.mine.div_(comm.size)

    def _body(self, payload: Payload) -> Tensor:
        assert isinstance(self.segment.compressor, Summable)
        return aligned(payload.body, self.segment.compressor.dtype)

    def plus(self, received: Payload | None) -> Payload:
        """The bodies' sum, in their own dtype."""
        if received is not None and received.finite and self.payload.finite:
            self._check(received)
            self.mine.add_(self._body(received))
        elif received is not None:
            self.payload = Payload.nonfinite(self.payload.numel, self.segment.state, self.segment.x.device)
        return self.payload

    def _check(self, received: Payload) -> None:
        """Raise FrameError if the received body cannot be added to that of this rank."""
        if received.body.numel() != self.payload.body.numel():
            raise FrameError(
                f"rank {_previous(self.comm)} sent a body of {received.body.numel()} bytes, and this rank's has "
                f"{self.payload.body.numel()}: they cannot be added."
            )
        if received.meta != self.payload.meta:
            raise FrameError(
                f"rank {_previous(self.comm)} and this rank drew different random numbers, so that their bodies cannot "
                "be added. Load states of the same step on all ranks."
            )

    def leave_rest(self, received: Payload | None, payload: Payload) -> None:
        """``x += n (received - sent)``: this includes the rounding error of adding two bodies."""
        came = [] if received is None else [Term(received, float(self.comm.size), _previous(self.comm))]
        self.segment.add([*came, Term(payload, -float(self.comm.size), self.comm.rank)])


def _mine(segment: Segment, comm: Comm) -> _Part:
    kind = _Summed if isinstance(segment.compressor, Summable) else _Recoded
    return kind(segment, comm)
