"""Dense: the uncompressed all-reduce, as DDP does it by itself."""

from dataclasses import dataclass

from torch import Tensor

from tersegrad.core import Comm, Finish, Layout, Needs, Reducer, State, Step, Vector, added


@dataclass(frozen=True, repr=False)
class Dense(Reducer):
    """All-reduce of the uncompressed bucket: the baseline, without loss.

    A host may all-reduce the bucket itself in a step in which every bucket's reducer is a ``Dense``.
    """

    def needs(self) -> Needs:
        """No float32 copy: buckets of every float dtype are reduced in their own dtype."""
        return Needs(float32=False)

    def init(self, layout: Layout, comm: Comm) -> State:
        return {}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """``out = sum over workers of x / n``; divided first, so that half precision does not overflow."""
        x = added(x)
        if out is not x:
            out.copy_(x)
            x.zero_()
        pending = comm.start_all_reduce(out.div_(comm.size))

        def finish() -> None:
            pending.wait()

        return finish
