"""AllGather: every worker sends its payload to all others, and all decode all of them."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad import wire
from tersegrad.core import Bucket, Comm, Compressor, Finish, Payload, Reducer, State, mix_seed, require


@dataclass(frozen=True, repr=False)
class AllGather(Reducer):
    """All-gather of payloads, decoded in rank order; for any compressor. Traffic grows with the number of workers."""

    examples: ClassVar[tuple[str, ...]] = ("AllGather(Identity())", "AllGather(TopK(0.1))")

    compressor: Compressor  # what makes the bytes

    def __post_init__(self) -> None:
        require(self, "compressor", Compressor, "Write e.g. AllGather(TopK(ratio=0.01)).")

    @property
    def conserves(self) -> bool:
        """As the compressor."""
        return self.compressor.conserves

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """The compressor's state, with randomness that differs between workers."""
        return self.compressor.init(bucket, mix_seed(bucket.seed, bucket.id, comm.rank))

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """Encode, gather, sum in rank order: all replicas do the same additions and hold the same bits."""
        self.start(bucket, x, out, state, comm)()

    def start(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> Finish:
        """Encode and send."""
        return self._send(self.compressor.encode(x, state), bucket, x, out, state, comm)

    def start_sum(
        self, bucket: Bucket, a: Tensor, b: Tensor, total: Tensor, out: Tensor, state: State, comm: Comm
    ) -> Finish:
        """Add, encode and send."""
        return self._send(self.compressor.encode_sum(a, b, total, state), bucket, total, out, state, comm)

    def _send(self, payload: Payload, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> Finish:
        """What needs this worker's payload alone is done while the others' are on their way."""
        gathering = wire.start_gather(payload, self.fingerprint(), bucket, comm, state)
        if out is not x:
            self.compressor.remove(payload, x, state)
        return lambda: self.compressor.sum_decoded(gathering.wait(), 1.0 / comm.size, out, state)
