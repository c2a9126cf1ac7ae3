"""Dense: the plain all-reduce, what DDP does without us."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.core import Bucket, Comm, Reducer, State


@dataclass(frozen=True, repr=False)
class Dense(Reducer):
    """Plain all-reduce of the bucket as it is: nothing compressed, nothing lost; the baseline."""

    any_dtype: ClassVar[bool] = True

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Nothing to remember."""
        return {}

    def plain(self, state: State, step: int) -> bool:
        """Always; but a subclass that does more than this must be asked."""
        return type(self).reduce is Dense.reduce

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """``out = sum over workers of x / n``; divided first, so that half precision does not overflow."""
        if out is not x:
            out.copy_(x)
            x.zero_()
        out.div_(comm.size)
        comm.all_reduce(out)
