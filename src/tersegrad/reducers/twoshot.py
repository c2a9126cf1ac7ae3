"""TwoShot: every worker reduces one segment in full precision, and all get the results: two encodings, two rounds."""

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
    """All-to-all of payloads, a sum in full precision, all-to-all of its payload; traffic as of a ring, in two rounds.

    With n workers and n segments, worker w sends Q(x) of every segment but its own, and keeps x - Q(x). Of its own
    it makes m = (x + sum of what came) / n, which is never encoded before the sum, and sends Q(m) to all, the mean.
    What Q(m) lacks is an error of the mean, so n times as much of one worker's gradient: it keeps n (m - Q(m)).
    """

    examples: ClassVar[tuple[str, ...]] = (
        "TwoShot(Identity())",
        "TwoShot(TopK(0.1))",
        "ErrorFeedback(TwoShot(TopK(0.1, values=BF16())))",
    )

    compressor: Compressor = param(doc="what makes the bytes")

    def __post_init__(self) -> None:
        require(self, "compressor", Compressor, "Write e.g. TwoShot(TopK(ratio=0.01)).")

    def _segmentation(self, layout: Layout, comm: Comm) -> Segmentation:
        return Segmentation(self.compressor, comm.size, mix_seed(layout.seed, layout.id, comm.rank))

    def init(self, layout: Layout, comm: Comm) -> State:
        """The compressor's states, one per segment."""
        return self._segmentation(layout, comm).init(layout)

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Send, sum, send; whatever can be done while messages travel is done then."""
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
        own.add(Term(payload, 1.0 / comm.size, rank) for rank, payload in came)
        mean = own.encode()
        finish = announce(segments, mean, comm)
        if keeps_rest:
            own.subtract(mean)
            own.x.mul_(comm.size)
        return finish
