"""TwoShot: every worker reduces one segment in full precision, and all get the results: two encodings, two rounds."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.core import Bucket, Comm, Compressor, Payload, Reducer, State, mix_seed, require
from tersegrad.reducers.segments import Cut, Segment, Term, arriving, receiving


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

    compressor: Compressor  # what makes the bytes

    def __post_init__(self) -> None:
        require(self, "compressor", Compressor, "Write e.g. TwoShot(TopK(ratio=0.01)).")

    @property
    def conserves(self) -> bool:
        """As the compressor."""
        return self.compressor.conserves

    def _cut(self, bucket: Bucket, comm: Comm) -> Cut:
        return Cut(self.compressor, comm.size, mix_seed(bucket.seed, bucket.id, comm.rank))

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """The compressor's states, one per segment."""
        return self._cut(bucket, comm).init(bucket)

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """Send, sum, send; whatever can be done while messages travel is done then."""
        segments = self._cut(bucket, comm).segments(bucket, x, out, state, self.fingerprint())
        own, keeps_rest = segments[comm.rank], out is not x
        under_way = []
        for by in range(1, comm.size):
            theirs = segments[(comm.rank + by) % comm.size]
            payload = theirs.encode()
            under_way.append(comm.start_shift(theirs.seal(payload), receiving(own, f"from {by}"), by))
            if keeps_rest:
                theirs.remove(payload)
        own.x.div_(comm.size)
        came = arriving(under_way, [own] * (comm.size - 1), comm)
        own.add(Term(payload, 1.0 / comm.size, rank) for rank, payload in came)
        self._spread(segments, own.encode(), keeps_rest, comm)

    def _spread(self, segments: list[Segment], mean: Payload, keeps_rest: bool, comm: Comm) -> None:
        """The second shot: this worker's mean to all, and theirs from all."""
        own = segments[comm.rank]
        frame = own.seal(mean)
        others = [segments[(comm.rank - by) % comm.size] for by in range(1, comm.size)]
        under_way = [
            comm.start_shift(frame, receiving(theirs, f"from {by}"), by) for by, theirs in enumerate(others, start=1)
        ]
        if keeps_rest:
            own.remove(mean)
            own.x.mul_(comm.size)
        own.decode(mean, comm.rank)
        for rank, payload in arriving(under_way, others, comm):
            segments[rank].decode(payload, rank)
