"""LowMemory: error feedback with a compressed residual."""

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.compressors._sparse import Selective
from tersegrad.compressors.cast import BF16
from tersegrad.compressors.pertensor import PerTensor
from tersegrad.core import (
    HEADER_NBYTES,
    Buffers,
    Comm,
    Compressor,
    Finish,
    Layout,
    Memory,
    Payload,
    Reducer,
    State,
    Step,
    Vector,
    accumulate,
    added,
    back_buffer,
    padded,
    param,
    require,
    scratch,
    stage,
)


@dataclass(frozen=True, repr=False)
class LowMemory(Memory):
    """Error feedback that stores the residual in compressed form: total = decoded(residual) + gradient.

    ErrorFeedback holds two float32 buffers of the size of the gradient. This holds two buffers encoded by ``codec``,
    with 2 bytes per element for BF16() and 1 for Blockwise(), and a float32 buffer as long as the largest bucket for
    each of the one or two buckets in flight. The price is the codec's rounding error of the residual in every step,
    which is lost, and two more passes.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "LowMemory(AllGather(TopK(0.1)))",
        "LowMemory(AllGather(TopK(0.1)), codec=Identity())",
    )

    inner: Reducer = param(doc="the reducer that sends")
    codec: Compressor = param(doc="codec of the residual: fewer bits => less memory, more is lost", factory=BF16)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "codec", Compressor, "Write e.g. codec=BF16() or codec=Blockwise().")
        if isinstance(self.codec, Selective | PerTensor):
            raise ValueError(
                f"LowMemory(codec={self.codec!r}): the codec keeps all elements of one tensor at a time. "
                "Write codec=BF16() or codec=Blockwise()."
            )

    def loses(self, workers: int) -> float:
        """The codec's error in addition to the loss of ``inner``; everything, if the codec guarantees no bound."""
        error = self.codec.traits().error
        return self.inner.loses(workers) + (1.0 if error is None else error)

    def init(self, layout: Layout, comm: Comm) -> State:
        """An encoded residual of zeros for each tensor, as a codec's blocks must not span two tensors."""
        codec, tensors = self.codec.init(layout, layout.seed), {}
        for name, size in zip(layout.names, layout.sizes, strict=True):
            payload = self.codec.encode(torch.zeros(size, device=layout.device), codec)
            tensors[f"tensor {name}"] = {
                "names": [name],
                "meta": list(payload.meta),
                "frame": _without_header(payload).clone(),
            }
        return {"tensors": tensors, "codec": codec, "inner": self.inner.init(layout, comm)}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Error feedback with the total in a buffer that all buckets share."""
        x, layout, buffers, idle = added(x), step.layout, Buffers.of(comm), step.idle or ()
        buffer = buffers.borrow(layout.numel, x.device)
        total = buffer[: layout.numel].copy_(x)
        self._add_residual(layout, total, state, idle)
        finish_inner = self.inner.start(step, total, out, state["inner"], comm)

        def finish() -> bool | None:
            finite = finish_inner()
            parts = zip(layout.names, state["tensors"].values(), total.split(layout.sizes), strict=True)
            for name, memory, part in parts:
                if name not in idle:
                    self._keep(memory, part, state["codec"])
                elif bool(part.any()):  # else what is remembered stays, to the bit
                    self._decode_add(memory, part)
                    self._keep(memory, part, state["codec"])
            buffers.give_back(buffer)
            if out is not x:
                x.zero_()  # all of it was sent, is in the residual, or was rounded away
            return finite

        return finish

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """The decoded residual."""
        total = scratch(state, "decoded", layout.numel, torch.float32, layout.device).zero_()
        self._add_residual(layout, total, state)
        return total

    def clear(self, layout: Layout, state: State) -> None:
        """Stage an encoded residual of zeros."""
        for memory, size in zip(state["tensors"].values(), layout.sizes, strict=True):
            self._keep(memory, torch.zeros(size, device=layout.device), state["codec"])
        self.inner.clear(layout, state["inner"])

    def _add_residual(self, layout: Layout, total: Tensor, state: State, idle: Container[str] = ()) -> None:
        parts = zip(layout.names, state["tensors"].values(), total.split(layout.sizes), strict=True)
        for name, memory, part in parts:
            if name not in idle:
                self._decode_add(memory, part)

    def _decode_add(self, memory: State, part: Tensor) -> None:
        meta = bytes(memory["meta"])
        body = memory["frame"][HEADER_NBYTES + padded(len(meta)) :]
        accumulate(self.codec, Payload(body, part.numel(), meta), part)

    def _keep(self, memory: State, rest: Tensor, codec: State) -> None:
        """Stage the encoded rest in the back buffer, which holds the residual of the step before last."""
        Payload.lend(back_buffer(memory, "frame"), codec)
        payload = self.codec.encode(rest, codec)
        stage(memory, meta=list(payload.meta), frame=_without_header(payload))


def _without_header(payload: Payload) -> Tensor:
    """The payload's frame; the room for a header holds zeros, because the frame is saved."""
    frame = payload.frame()
    frame[:HEADER_NBYTES].zero_()
    return frame
