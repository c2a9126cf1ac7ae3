"""Record the messages of a reducer with two and three workers, and extrapolate to any number of workers."""

from dataclasses import dataclass

from torch import Tensor

from tersegrad.comm.traffic import padded_length
from tersegrad.core import HEADER_NBYTES, Comm, Pending
from tersegrad.plan.cost import ALL_GATHER, ALL_REDUCE, BROADCAST, NEIGHBOUR, RING, RING_GATHER, TWO_SHOT

LENGTH_NBYTES = 8  # of the length that is sent before the bytes in an all-gather

# Bytes that a worker sends with three workers, relative to those with two:
GROWTH = {
    "constant": 1.0,  # to one other worker, however many there are
    "divided": 4 / 3,  # 2 (n-1)/n: a share of the payload to each, twice
    "whole": 2.0,  # n-1: the whole payload to each
}
TOLERANCE = 0.1  # of the growth, as the lengths of payloads vary with the data
Messages = tuple[tuple[str, int], ...]  # collective and bytes of the payload


@dataclass(frozen=True)
class Sent:
    """One message that a worker has started."""

    nbytes: int
    round: int  # 1: at once; n + 1: after one of round n was waited for


class Recorder(Comm):
    """A Comm that records every message and passes it on."""

    def __init__(self, inner: Comm):
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.clear()

    def clear(self) -> None:
        """Discard all records."""
        self.collectives: list[tuple[str, int]] = []
        self.messages: list[Sent] = []
        self._waited = 0  # the latest round with a message that was waited for

    def start_all_reduce(self, x: Tensor) -> Pending:
        self.collectives.append((ALL_REDUCE, x.numel() * x.element_size()))
        return self.inner.start_all_reduce(x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Two rings: one for the lengths, one for the data."""
        gathered = self.inner.all_gather(x)
        longest = padded_length([part.numel() for part in gathered])
        self.collectives += [(RING_GATHER, LENGTH_NBYTES), (RING_GATHER, longest)]
        return gathered

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        if x.numel() and by % self.size:
            self.messages.append(Sent(x.numel(), self._waited + 1))
        pending = self.inner.start_shift(x, into, by)
        return _Recorded(pending, self, self._waited + 1) if into.numel() else pending

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """Recorded as if this worker were the root, which sends most."""
        self.collectives.append((BROADCAST, x.numel() * x.element_size()))
        self.inner.broadcast(x, root)

    def note_wait(self, round: int) -> None:
        """A message of this round was waited for, so later messages may depend on it."""
        self._waited = max(self._waited, round)

    @property
    def rounds(self) -> int:
        """How many messages follow each other."""
        return max((message.round for message in self.messages), default=0)

    @property
    def payload(self) -> int:
        """Bytes of all messages without their headers."""
        return sum(max(0, message.nbytes - HEADER_NBYTES) for message in self.messages)


class _Recorded(Pending):
    """A pending message that notifies the recorder when it is waited for."""

    def __init__(self, inner: Pending, recorder: Recorder, round: int):
        self._inner, self._recorder, self._round = inner, recorder, round

    def wait(self) -> Tensor:
        received = self._inner.wait()
        self._recorder.note_wait(self._round)
        return received


def messages_of(two: Recorder, three: Recorder) -> Messages:
    """The messages of a worker, as collectives whose costs are known for any number of workers.

    Collectives are recorded as such. The pattern of messages to single workers follows from three facts: how much more
    a worker sends to two others than to one, in how many rounds, and whether the number of rounds grows.

    Args:
        two: the record of one of two workers in a step.
        three: the record of one of three workers in the same step.
    """
    parts = _parts(two, three) if two.messages else {}
    waits_longer = three.rounds > two.rounds
    exchanges = {
        "constant": NEIGHBOUR,
        "divided": RING if waits_longer else TWO_SHOT,
        "whole": RING_GATHER if waits_longer and "divided" not in parts else ALL_GATHER,
    }
    return (*two.collectives, *((exchanges[kind], HEADER_NBYTES + nbytes) for kind, nbytes in parts.items()))


def _parts(two: Recorder, three: Recorder) -> dict[str, int]:
    if two.payload:
        return shares(two.payload, three.payload)
    return dict.fromkeys(shares(len(two.messages), len(three.messages)), 0)  # nothing but headers


def shares(two: int, three: int) -> dict[str, int]:
    """Split the bytes that a worker sends to one other by how they grow, if it sends ``three`` to two others.

    >>> shares(900, 1800), shares(900, 1200), shares(900, 1500), shares(900, 900)
    ({'whole': 900}, {'divided': 900}, {'divided': 450, 'whole': 450}, {'constant': 900})
    """
    growth, divided, whole = three / two, GROWTH["divided"], GROWTH["whole"]
    kind = min(GROWTH, key=lambda name: abs(GROWTH[name] - growth))
    if divided + TOLERANCE < growth < whole - TOLERANCE:  # a mixture of both
        of_whole = round(two * (growth - divided) / (whole - divided))
        return {"divided": two - of_whole, "whole": of_whole}
    return {kind: two}
