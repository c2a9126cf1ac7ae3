"""LowMemory: error feedback whose residual is kept in few bits."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.compressors.cast import BF16
from tersegrad.compressors.per_tensor import PerTensor
from tersegrad.compressors.sparse import Selective
from tersegrad.core import HEADER_NBYTES, Bucket, Comm, Compressor, Payload, Reducer, State, later, require, scratch
from tersegrad.wrappers.memory import refuse_memory


@dataclass(frozen=True, repr=False)
class LowMemory(Reducer):
    """total = decoded(residual) + gradient; sends of the total what ``inner`` sends; residual = coded(the rest).

    ErrorFeedback holds two float32 buffers of a gradient's size. This holds two of what ``codec`` makes of it, 2 bytes
    an element each with BF16() and 1 with Blockwise(), and one float32 buffer as long as the largest bucket, for all
    buckets. The price is the codec's rounding of the residual in every step, which is lost, and two more passes.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "LowMemory(AllGather(TopK(0.1)))",
        "LowMemory(AllGather(TopK(0.1)), codec=Identity())",
    )
    remembers: ClassVar[bool] = True

    inner: Reducer  # what sends
    codec: Compressor = field(default_factory=BF16)  # of the residual: fewer bits => less memory, more is lost

    def __post_init__(self) -> None:
        require(self, "inner", Reducer, f"Write LowMemory(AllGather({self.inner!r})).")
        require(self, "codec", Compressor, "Write e.g. codec=BF16() or codec=Blockwise().")
        refuse_memory(self, self.inner)
        if isinstance(self.codec, Selective | PerTensor):
            raise ValueError(
                f"LowMemory(codec={self.codec!r}): the codec keeps all elements of one tensor at a time. "
                "Write codec=BF16() or codec=Blockwise()."
            )

    @property
    def conserves(self) -> bool:
        """Not what the codec rounds away."""
        return False

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """The code of zeros, tensor by tensor, because blocks of a code must not reach into the next tensor."""
        codec, tensors = self.codec.init(bucket, bucket.seed), {}
        for name, size in zip(bucket.names, bucket.sizes, strict=True):
            payload = self.codec.encode(torch.zeros(size), codec)
            tensors[f"tensor {name}"] = {"names": [name], "frame": payload.frame.clone()}
        return {"tensors": tensors, "codec": codec, "inner": self.inner.init(bucket, comm)}

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """As ErrorFeedback, with the total in room that all buckets share."""
        total = comm.room(bucket.numel).copy_(x)
        self._add_residual(bucket, total, state)
        self.inner.reduce(bucket, total, out, state["inner"], comm)
        for memory, part in zip(state["tensors"].values(), total.split(bucket.sizes), strict=True):
            self._keep(memory, part, state["codec"])
        if out is not x:
            x.zero_()  # all of it is sent, remembered or rounded away

    def waiting(self, bucket: Bucket, state: State) -> Tensor | None:
        """The residual, decoded."""
        total = scratch(state, "waiting", bucket.numel, torch.float32, torch.device("cpu")).zero_()
        self._add_residual(bucket, total, state)
        return total

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """The residual goes out."""
        self._add_residual(bucket, out, state)
        for memory, size in zip(state["tensors"].values(), bucket.sizes, strict=True):
            self._keep(memory, torch.zeros(size), state["codec"])
        self.inner.flush(bucket, out, state["inner"])

    def _add_residual(self, bucket: Bucket, total: Tensor, state: State) -> None:
        for memory, part in zip(state["tensors"].values(), total.split(bucket.sizes), strict=True):
            self.codec.accumulate(Payload(memory["frame"][HEADER_NBYTES:], part.numel()), part)

    def _keep(self, memory: State, rest: Tensor, codec: State) -> None:
        """The code of the step before last makes room for this one: two that change places, and no third."""
        codec["_payload"] = memory.get("_spare_frame", torch.empty(0, dtype=torch.uint8))
        later(memory, frame=self.codec.encode(rest, codec).frame)
