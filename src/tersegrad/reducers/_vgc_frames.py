"""What VGC sends: packed positions and values, or the paper's 32-bit words."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors import _word32
from tersegrad.compressors._fixed_width import FixedWidth, group_lengths
from tersegrad.compressors._sparse import Selection, Sparse
from tersegrad.core import Compressor, Paused, Payload, State, report, scratch
from tersegrad.core.pausing import done


@dataclass(frozen=True, repr=False)
class Picked(Sparse):
    """Sends the positions that VGC selected, with one group of values per tensor."""

    values: Compressor

    def selecting(self, x: Tensor, state: State) -> Paused[Selection | None]:
        """The positions were selected before, by VGC itself."""
        positions: Tensor | None = state["_positions"]
        if positions is None:
            return done(None)
        state["values"]["_groups"] = group_lengths(positions, state["_offsets"])
        return done(Selection(positions))


@dataclass(frozen=True, repr=False)
class Words(Compressor):
    """``Picked`` in the paper's layout: one 32-bit word per element."""

    values: FixedWidth

    def encode(self, x: Tensor, state: State) -> Payload:
        positions: Tensor | None = state["_positions"]
        if positions is None:
            return Payload.nonfinite(x.numel(), state, x.device)
        report(state, sent=positions.numel(), of=x.numel())
        picked = scratch(state, "picked", positions.numel(), torch.float32, x.device)
        kernels.on(x).gather(x, positions, picked)
        largest = state.get("_largest")
        return _word32.pack(self.values, picked, positions, state["_offsets"], x.numel(), state, largest)

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        _word32.unpack(self.values, payload, acc, scale)
