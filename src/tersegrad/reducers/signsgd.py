"""SignSGD: every worker has one vote per element, and the result is the sign of the majority.

Bernstein et al., "signSGD: compressed optimisation for non-convex problems", ICML 2018; "signSGD with majority vote is
communication efficient and fault tolerant", ICLR 2019.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.comm.frame import FrameError
from tersegrad.compressors._grouped import read
from tersegrad.compressors.scaledsign import ScaledSign
from tersegrad.core import (
    Comm,
    Finish,
    Layout,
    Needs,
    Payload,
    Reducer,
    State,
    Step,
    Vector,
    added,
    back_buffer,
    mix_seed,
    param,
    stage,
)
from tersegrad.kernels.ops import packed_nbytes
from tersegrad.reducers._segments import Segment, announce, arriving, places

SCALES = ("one", "mean")
_BALLOT = ScaledSign()  # codec of the votes on a segment: signs, and a magnitude in place of the mean


@dataclass(frozen=True, repr=False)
class SignSGD(Reducer):
    """Majority vote of signs: out = magnitude * sign(sum over workers of sign(v)), one bit per element each way.

    v is the gradient or, with momentum b (Signum), its running mean: v = b v + (1 - b) gradient. A sign is the float's
    sign bit, so a zero votes too. With an even number of workers there may be ties, which a hash of (seed, step,
    position) breaks, without bias.

    Every worker counts the votes on one segment of the bucket and sends the result to all others: each sends about
    n / 4 bytes, however many workers there are. ``x - out`` stays in ``x``.
    """

    examples: ClassVar[tuple[str, ...]] = ("SignSGD()", "SignSGD(momentum=0.9, scale='mean')")

    momentum: float = param(0.0, "b: higher => smoother, slower to change; 0: signSGD, above: Signum")
    scale: str = param("one", 'magnitude of out: "one", as in the papers; or "mean": the mean over workers of mean|v|')

    def __post_init__(self) -> None:
        b = self.momentum
        if isinstance(b, bool) or not isinstance(b, int | float) or not 0 <= b < 1:
            raise ValueError(f"SignSGD(momentum={b!r}): from 0 to below 1. The papers have 0 and 0.9.")
        if self.scale not in SCALES:
            raise ValueError(f"SignSGD(scale={self.scale!r}): write 'one' or 'mean'.")

    def needs(self) -> Needs:
        """Signum has a momentum of its own."""
        return Needs(no_momentum=self.momentum > 0)

    def init(self, layout: Layout, comm: Comm) -> State:
        return {"momentum": layout.zeros()} if self.momentum else {}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Send votes, count those on the own segment, and announce the result."""
        x = added(x)
        segments = self._segments(step, self._signed(x, state), out, state, comm)
        ballots = self._ballots(segments, step.layout.numel)
        own = segments[comm.rank]
        under_way = []
        for by in range(1, comm.size):
            to = (comm.rank + by) % comm.size
            under_way.append(comm.start_shift(segments[to].seal(ballots[to]), own.receive_buffer(f"from {by}"), by))
        theirs = {comm.name(rank): ballot for rank, ballot in arriving(under_way, [own] * len(under_way), comm)}
        key = mix_seed(step.layout.seed, step.number, own.step.layout.id)
        all_ballots = {comm.name(comm.rank): ballots[comm.rank]} | theirs
        finish_announce = announce(segments, _count(own, all_ballots, key), comm)

        def finish() -> None:
            finish_announce()
            if out is not x:
                x.sub_(out)

        return finish

    def _signed(self, x: Tensor, state: State) -> Tensor:
        """The vector whose signs are this worker's votes: the gradient, or its running mean."""
        if not self.momentum:
            return x
        mean = torch.mul(state["momentum"], self.momentum, out=back_buffer(state, "momentum"))
        mean.add_(x, alpha=1.0 - self.momentum)
        stage(state, momentum=mean)
        return mean

    def _segments(self, step: Step, v: Tensor, out: Tensor, state: State, comm: Comm) -> list[Segment]:
        made = []
        for i, (part, start, stop) in enumerate(places(step.layout, comm.size, state)):
            inner = state.setdefault(f"_segment {i}", {})
            at = step.on(part)
            ours = v[start:stop], out[start:stop]
            made.append(Segment(_BALLOT, self.fingerprint(), at, inner, state, *ours, comm.signer))
        return made

    def _ballots(self, segments: list[Segment], numel: int) -> list[Payload]:
        """This worker's votes on all segments, each with its magnitude; all are non-finite if one is."""
        ballots = [segment.encode() for segment in segments]
        if not all(ballot.finite for ballot in ballots):
            return [_nonfinite(segment) for segment in segments]
        magnitude = 1.0
        if self.scale == "mean":
            magnitude = math.fsum(_magnitude(b) * b.numel for b in ballots if b.numel) / max(numel, 1)
        for ballot in ballots:
            _set_magnitude(ballot, magnitude)
        return ballots


def _count(own: Segment, ballots: dict[int, Payload], key: int) -> Payload:
    """The signs of the majority with the mean magnitude; votes are counted in ``own.out``."""
    if not own.numel:
        return own.encode()
    if not all(ballot.finite for ballot in ballots.values()):
        return _nonfinite(own)
    votes, kernel, either = own.out.zero_(), kernels.on(own.out), torch.tensor([1.0, -1.0], device=own.out.device)
    magnitudes = []
    for rank, ballot in ballots.items():
        magnitude, signs = _read_ballot(ballot, rank)
        magnitudes.append(magnitude)
        kernel.signs_decode_add(signs, either, votes.numel(), votes, 1.0)
    if len(ballots) % 2 == 0:
        kernel.break_ties(votes, key)
    result = _BALLOT.encode(votes, own.state)
    _set_magnitude(result, math.fsum(magnitudes) / len(magnitudes))
    return result


def _read_ballot(ballot: Payload, rank: int) -> tuple[float, Tensor]:
    try:
        magnitude, signs = read(_BALLOT, ballot, 1, packed_nbytes(ballot.numel, 1))
        if magnitude < 0:
            raise ValueError(f"a magnitude must not be negative, got {float(magnitude):.4g}.")
    except ValueError as error:
        raise FrameError(f"rank {rank} sent a frame that cannot be decoded: {error}") from error
    return float(magnitude), signs


def _nonfinite(segment: Segment) -> Payload:
    """A payload that makes the mean non-finite."""
    if not segment.numel:
        return segment.encode()
    return Payload.nonfinite(segment.numel, segment.state, segment.x.device)


def _magnitude(ballot: Payload) -> float:
    return float(ballot.body[:4].view(torch.float32))


def _set_magnitude(ballot: Payload, magnitude: float) -> None:
    if ballot.numel:
        ballot.body[:4].view(torch.float32).fill_(magnitude)
