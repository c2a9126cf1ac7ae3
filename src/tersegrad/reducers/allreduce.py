"""AllReduce: summable payloads are added by the collective itself, in compressed form."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core import (
    Comm,
    Compressor,
    Finish,
    Layout,
    Reducer,
    State,
    Step,
    Sum,
    Summable,
    Vector,
    accumulate,
    decode_sum,
    encode,
    mix_seed,
    param,
    require,
)


@dataclass(frozen=True, repr=False)
class AllReduce(Reducer):
    """All-reduce of summable payloads (casts, RandomK). Traffic does not grow with the number of workers."""

    examples: ClassVar[tuple[str, ...]] = ("AllReduce(Identity())", "AllReduce(BF16())", "AllReduce(FP16())")

    compressor: Summable = param(doc="a summable compressor")

    def __post_init__(self) -> None:
        require(self, "compressor", Compressor, "Write e.g. AllReduce(BF16()).")
        given: Compressor = self.compressor
        if not isinstance(given, Summable):
            name = type(given).__name__
            raise ValueError(
                f"AllReduce({name}): {name} payloads cannot be added before decoding. Use AllGather({given!r})."
            )

    def loses(self, workers: int) -> float:
        """A sum in a narrow dtype is rounded at every addition; in float32 the loss is negligible."""
        narrow = self.compressor.dtype != torch.float32
        return workers * torch.finfo(self.compressor.dtype).eps if narrow else 0.0

    def init(self, layout: Layout, comm: Comm) -> State:
        """The compressor's state, with the same seed on all workers: otherwise payloads could not be added."""
        return self.compressor.init(layout, mix_seed(layout.seed, layout.id))

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """``out = decode(sum over workers of encode(x) / n)``; divided first, so that the sum stays in range."""
        payload = encode(self.compressor, x, state)
        body = payload.body.view(self.compressor.dtype).div_(comm.size)
        rest = x.total if isinstance(x, Sum) else x
        if rest is not out:
            accumulate(self.compressor, payload, rest, -float(comm.size))
        pending = comm.start_all_reduce(body)

        def finish() -> bool | None:
            pending.wait()
            return decode_sum(self.compressor, [payload], 1.0, out, state)

        return finish
