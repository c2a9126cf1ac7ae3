"""RandomK: random elements, drawn again at each step, the same on all workers; only their values are sent.

Stich et al., "Sparsified SGD with memory", NeurIPS 2018; Wangni et al., "Gradient sparsification for
communication-efficient distributed optimization", NeurIPS 2018 (unbiased).
Meta: the key that the positions are drawn from (8 bytes). Body: k float32 values.
"""

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._sparse import require_int32
from tersegrad.compressors._threshold import count_of
from tersegrad.compressors.identity import aligned
from tersegrad.core import (
    Layout,
    Paused,
    Pausing,
    Payload,
    State,
    Summable,
    Traits,
    mix_seed,
    param,
    report,
    require_fraction,
    scratch,
    stage,
)

_KEY = struct.Struct("<Q")
_LIMIT = 2.0**124  # largest scaled value: sums and differences of several of them stay finite


@dataclass(frozen=True, repr=False)
class RandomK(Pausing, Summable):
    """Sends x at k = max(1, round(ratio * n)) distinct random positions, each drawn with probability k / n.

    Workers with the same seed draw the same positions, so that payloads may be added (``AllReduce``,
    ``Ring``). Positions are not sent: they are drawn again from the key.
    """

    examples: ClassVar[tuple[str, ...]] = ("RandomK(0.1)", "RandomK(0.2, unbiased=True)")
    dtype: ClassVar[torch.dtype] = torch.float32

    ratio: float = param(0.01, "fraction of elements sent: lower => fewer bytes, larger residual")
    unbiased: bool = param(False, "True: values are multiplied by n / k; only without error feedback")

    def __post_init__(self) -> None:
        require_fraction(self, "ratio", "1 % is RandomK(ratio=0.01).")
        if type(self.unbiased) is not bool:
            raise ValueError(f"RandomK(unbiased={self.unbiased!r}): write True or False.")

    def traits(self) -> Traits:
        """With scaling, the error at a drawn position is (1 - n / k) x: not a contraction."""
        return Traits(unbiased=self.unbiased, contracts=not self.unbiased)

    def init(self, layout: Layout, seed: int) -> State:
        """The seed and the number of encodings so far determine all random draws."""
        return {"seed": seed, "calls": 0}

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        """Draw and gather. If ``x`` is non-finite all values are NaN: a body of another length could not be added."""
        require_int32(x)
        n, kernel = x.numel(), kernels.on(x)
        k = count_of(self.ratio, n)
        report(state, sent=k, of=n)
        key = mix_seed(state["seed"], state["calls"], n)  # n: buckets split from one share its seed
        stage(state, calls=state["calls"] + 1)
        payload = Payload.empty(4 * k, n, state, x.device, _KEY.pack(key))
        values = payload.body.view(torch.float32)
        (finite,) = yield (kernel.all_finite(x),)
        if not finite:
            values.fill_(math.nan)
            return payload
        positions = scratch(state, "positions", k, torch.int32, x.device)
        kernel.stratified(n, key, positions)
        kernel.gather(x, positions, values)
        if self.unbiased and k:
            values.mul_(n / k).clamp_(-_LIMIT, _LIMIT)
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc[positions] += scale * values``, with the positions drawn from the key; every key is valid."""
        k = count_of(self.ratio, payload.numel)
        if payload.body.numel() != 4 * k or len(payload.meta) != _KEY.size:
            raise ValueError(
                f"{payload.numel} elements of {self!r} take {_KEY.size} bytes of meta and {4 * k} of body; "
                f"got {len(payload.meta)} and {payload.body.numel()}."
            )
        (key,) = _KEY.unpack(payload.meta)
        positions = torch.empty(k, dtype=torch.int32, device=acc.device)
        kernels.on(acc).stratified(payload.numel, key, positions)
        kernels.on(acc).scatter_add(acc, positions, aligned(payload.body, torch.float32), scale)
