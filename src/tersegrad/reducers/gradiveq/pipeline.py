"""The paper's Algorithm 1: a ring in which the next segment is compressed while the last one travels.

There is a segment for every worker (or ``pieces`` of it), each a whole number of slices. Worker n compresses its own
segment n and sends it on. Then it compresses its part of segment n - i while what others made of that segment arrives,
adds, and sends on. In the end it has the sum of segment n + 1, and every sum goes round once more: one is decompressed
while the next arrives.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tersegrad.core import Comm, Layout, Pending, State, Step, scratch
from tersegrad.reducers._segments import Segment
from tersegrad.reducers.gradiveq.layer import Layer, Run
from tersegrad.reducers.gradiveq.rest import Rest
from tersegrad.reducers.ring import go_round

if TYPE_CHECKING:
    from tersegrad.reducers.gradiveq import GradiVeQ


def reduce_coded(spec: "GradiVeQ", step: Step, coded: list[Layer], rest: Rest, state: State, comm: Comm) -> list[float]:
    """Reduce the coded layers, and the rest by an all-reduce that begins when all coefficients are made.

    Returns:
        The mean over workers of what ``spec.opinions`` says of the layers whose loss is measured in this step.
    """
    ring = spec.ring
    assert ring is not None
    segments = _segments(spec, step, cut(coded, comm.size * ring.pieces), rest.in_place, state, comm)
    uncompressed: list[Pending] = []

    def reduce_rest() -> None:
        message = rest.pack([coded[0].x.new_tensor(spec.opinions(coded))], state)
        uncompressed.append(comm.start_all_reduce(message.div_(comm.size)))

    go_round(segments, ring.pieces, comm, not rest.in_place, reduce_rest)
    (seen,) = rest.unpack(uncompressed[0].wait())
    found: list[float] = seen.tolist()
    return found


def cut(coded: list[Layer], count: int) -> list[list[Run]]:
    """The slices of all layers in ``count`` segments with nearly the same number of coefficients."""
    total, before = sum(layer.size for layer in coded), 0
    segments: list[list[Run]] = [[] for _ in range(count)]
    for run in (run for layer in coded for run in layer.runs):
        slices, d = run.subspace.count, run.subspace.size // run.subspace.count
        ends = [_within(round((total * i / count - before) / d), slices) for i in range(1, count)]
        for segment, first, last in zip(segments, [0, *ends], [*ends, slices], strict=True):
            if first < last:
                segment.append(run.rows(first, last))
        before += run.subspace.size
    return segments


def _within(place: int, slices: int) -> int:
    return min(max(place, 0), slices)


def _segments(
    spec: "GradiVeQ", step: Step, cuts: list[list[Run]], in_place: bool, state: State, comm: Comm
) -> list["CodedSegment"]:
    """The segments with their coefficients, which lie side by side in scratch."""
    ring = spec.ring
    assert ring is not None
    memory: State = state.setdefault("_ring", {})
    sizes = [sum(run.subspace.size for run in runs) for runs in cuts]
    x = next(run.layer.x for runs in cuts for run in runs)
    vectors = {
        key: scratch(memory, key, sum(sizes), x.dtype, x.device).split(sizes)
        for key in ("made", "mean", *(() if in_place else ("own",)))
    }
    made = []
    for i, (runs, part) in enumerate(zip(cuts, _layouts(step.layout, sizes, memory), strict=True)):
        inner = memory.setdefault(f"segment {i}", {})
        own = None if in_place else vectors["own"][i]
        place = vectors["made"][i], vectors["mean"][i], comm.signer, runs, own, state
        made.append(CodedSegment(ring.compressor, spec.fingerprint(), step.on(part), inner, memory, *place))
    return made


def _layouts(layout: Layout, sizes: list[int], memory: State) -> list[Layout]:
    """Of the segments' coefficients; made anew when their number has changed."""
    if memory.get("sizes") != (layout.id, sizes):
        memory["sizes"] = layout.id, sizes
        memory["layouts"] = [
            Layout((f"coefficients {i} of {layout.id}",), ((size,),), layout.seed, layout.device)
            for i, size in enumerate(sizes)
        ]
    found: list[Layout] = memory["layouts"]
    return found


@dataclass
class CodedSegment(Segment):
    """Coefficients that are made when the ring asks for them, and decoded when their mean is there."""

    runs: list[Run]
    own: Tensor | None  # what this worker made, if it is asked what was not sent
    bucket: State  # scratch of the slices

    def fill(self) -> None:
        """``x = U^T (g - mu)``."""
        for run, c in self._each(self.x):
            run.encode(c, self.bucket)
        if self.own is not None:
            self.own.copy_(self.x)

    def empty(self) -> None:
        """The mean gradient is ``U c + mu``; what was sent leaves this worker's own."""
        if self.own is not None:
            for run, c in self._each(self.own.sub_(self.x)):
                run.decode(c, run.layer.x, self.bucket, subtract=True)
        for run, c in self._each(self.out):
            run.decode(c, run.layer.out, self.bucket)

    def _each(self, c: Tensor) -> Iterator[tuple[Run, Tensor]]:
        return zip(self.runs, c.split([run.subspace.size for run in self.runs]), strict=True)
