"""The rest of a bucket: tensors that are neither compressed nor sent separately, packed into one vector."""

import torch
from torch import Tensor

from tersegrad.core import Layout, State, scratch
from tersegrad.reducers.gradiveq.layer import Layer


class Rest:
    """The tensors of a bucket that are neither compressed nor sent separately."""

    def __init__(self, layout: Layout, others: list[Layer], x: Tensor, out: Tensor):
        self._slices = _outside(layout, {layer.place for layer in others})
        self._x, self._out = x, out
        self.in_place = out is x

    def pack(self, more: list[Tensor], state: State) -> Tensor:
        """One vector of these tensors and of some more."""
        parts = [*(self._x[start:stop] for start, stop in self._slices), *more]
        self._lengths = [part.numel() for part in parts]
        message = scratch(state, "message", sum(self._lengths), self._x.dtype, self._x.device)
        return torch.cat(parts, out=message)

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Put the means in their place; return those of the others that were packed."""
        parts = message.split(self._lengths)
        for (start, stop), part in zip(self._slices, parts, strict=False):
            if not self.in_place:
                self._x[start:stop].zero_()
            self._out[start:stop].copy_(part)
        return list(parts[len(self._slices) :])


def _outside(layout: Layout, members: set[int]) -> list[tuple[int, int]]:
    """Start and stop of the slices of a bucket between the members."""
    slices: list[tuple[int, int]] = []
    for i, (start, end) in enumerate(zip(layout.offsets, layout.offsets[1:], strict=False)):
        if i in members:
            continue
        if slices and slices[-1][1] == start:
            slices[-1] = (slices[-1][0], end)
        else:
            slices.append((start, end))
    return slices
