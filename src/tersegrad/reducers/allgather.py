"""AllGather: every worker sends its payload to all others and decodes all payloads."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.comm.exchange import start_gather
from tersegrad.comm.frame import blaming
from tersegrad.core import (
    Comm,
    Compressor,
    Finish,
    Layout,
    Payload,
    Reducer,
    State,
    Step,
    Sum,
    Vector,
    decode_sum,
    encode,
    mix_seed,
    param,
    require,
    subtract,
)


@dataclass(frozen=True, repr=False)
class AllGather(Reducer):
    """All-gather of payloads, decoded in rank order; for any compressor. Traffic grows with the number of workers."""

    examples: ClassVar[tuple[str, ...]] = ("AllGather(Identity())", "AllGather(TopK(0.1))")

    compressor: Compressor = param(doc="the codec of the payloads")

    def __post_init__(self) -> None:
        require(self, "compressor", Compressor, "Write e.g. AllGather(TopK(ratio=0.01)).")

    def init(self, layout: Layout, comm: Comm) -> State:
        """The compressor's state, with a different seed on every worker."""
        return self.compressor.init(layout, mix_seed(layout.seed, layout.id, comm.rank))

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Encode and send; then sum in rank order, so that all workers get the same bits."""
        payload = encode(self.compressor, x, state)
        gathering = start_gather(payload, self.fingerprint(), step, comm, state)
        if isinstance(x, Sum):
            subtract(self.compressor, payload, x.total, state)
        elif out is not x:
            subtract(self.compressor, payload, x, state)

        def finish() -> bool | None:
            messages = gathering.wait()
            return comm.same_on_all(lambda: self._decode(gathering.open(messages), out, state, comm), out)

        return finish

    def _decode(self, payloads: list[Payload], out: Tensor, state: State, comm: Comm) -> bool | None:
        try:
            return decode_sum(self.compressor, payloads, 1.0 / len(payloads), out, state)
        except ValueError:
            for rank, payload in enumerate(payloads):  # one after the other, to see whose it was
                with blaming(comm.name(rank)):
                    decode_sum(self.compressor, [payload], 1.0, out, state)
            raise
