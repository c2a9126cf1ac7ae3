"""TwoShot: every worker reduces one segment in full precision and sends the result to all: two rounds."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.core import (
    Comm,
    Compressor,
    Finish,
    Layout,
    Reducer,
    State,
    Step,
    Vector,
    added,
    mix_seed,
    param,
    require,
)
from tersegrad.reducers._segments import Segmentation, Term, announce, arriving


@dataclass(frozen=True, repr=False)
class TwoShot(Reducer):
    """All-to-all of payloads, a sum in full precision, all-to-all of its payload; a ring's traffic in two rounds.

    With n workers and n segments, worker w sends Q(x) of every segment but its own, and keeps x - Q(x). For its own
    segment it computes the mean m = (x + sum of the received payloads) / n, with its own x unencoded, and sends Q(m) to
    all. The error m - Q(m) of the mean is n times as much in one worker's gradient: it keeps n (m - Q(m)).
    """

    examples: ClassVar[tuple[str, ...]] = (
        "TwoShot(Identity())",
        "TwoShot(TopK(0.1))",
        "ErrorFeedback(TwoShot(TopK(0.1, values=BF16())))",
    )

    compressor: Compressor = param(doc="the codec of the payloads")

    def __post_init__(self) -> None:
        require(self, "compressor", Compressor, "Write e.g. TwoShot(TopK(ratio=0.01)).")

    def _segmentation(self, layout: Layout, comm: Comm) -> Segmentation:
        return Segmentation(self.compressor, comm.size, mix_seed(layout.seed, layout.id, comm.rank), comm.signer)

    def init(self, layout: Layout, comm: Comm) -> State:
        """The compressor's states, one per segment."""
        return self._segmentation(layout, comm).init(layout)

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Send, sum, send; computation overlaps with messages in flight."""
        x = added(x)
        segments = self._segmentation(step.layout, comm).segments(step, x, out, state, self.fingerprint())
        own, keeps_rest = segments[comm.rank], out is not x
        under_way = []
        for by in range(1, comm.size):
            theirs = segments[(comm.rank + by) % comm.size]
            payload = theirs.encode()
            under_way.append(comm.start_shift(theirs.seal(payload), own.receive_buffer(f"from {by}"), by))
            if keeps_rest:
                theirs.subtract(payload)
        own.x.div_(comm.size)
        came = arriving(under_way, [own] * (comm.size - 1), comm)
        own.add(Term(payload, 1.0 / comm.size, comm.name(rank)) for rank, payload in came)
        mean = own.encode()
        finish = announce(segments, mean, comm)
        if keeps_rest:
            own.subtract(mean)
            own.x.mul_(comm.size)
        return finish
