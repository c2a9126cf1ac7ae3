"""AllReduce: payloads that may be added are summed on their way, in the compressed form."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core import Bucket, Comm, Compressor, Reducer, State, mix_seed, require


@dataclass(frozen=True, repr=False)
class AllReduce(Reducer):
    """All-reduce of payloads that may be added (casts, RandomK). Traffic does not grow with the number of workers."""

    examples: ClassVar[tuple[str, ...]] = ("AllReduce(Identity())", "AllReduce(BF16())", "AllReduce(FP16())")

    compressor: Compressor  # a summable one

    def __post_init__(self) -> None:
        require(self, "compressor", Compressor, "Write e.g. AllReduce(BF16()).")
        if self.compressor.summable is None:
            name = type(self.compressor).__name__
            raise ValueError(
                f"AllReduce({name}): {name} payloads cannot be added before decoding. "
                f"Use AllGather({self.compressor!r})."
            )

    @property
    def conserves(self) -> bool:
        """Only in float32: the rounding of a sum made on the way in a narrower float belongs to no worker."""
        return self.compressor.conserves and self.compressor.summable == torch.float32

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """The compressor's state, with the same randomness on all workers: only so can payloads be added."""
        return self.compressor.init(bucket, mix_seed(bucket.seed, bucket.id))

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """``out = decode(sum over workers of encode(x) / n)``; divided first, so that the sum stays in range."""
        payload = self.compressor.encode(x, state)
        summed = self.compressor.summed(payload).div_(comm.size)
        if out is not x:
            self.compressor.accumulate(payload, x, -float(comm.size))
        comm.all_reduce(summed)
        acc = self.compressor.accumulator(out, state)
        self.compressor.accumulate(payload, acc)
        self.compressor.finish(acc, out, state)
