"""PerTensor: apply another compressor to each tensor of the bucket separately, in one payload.

The result then does not depend on which tensors share a bucket.
Meta: number of tensors; elements, bytes of body and bytes of meta of each; then their meta.
Body: their bodies, each padded to whole words.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core import (
    Compressor,
    Layout,
    Paused,
    Pausing,
    Payload,
    State,
    Sum,
    Traits,
    Vector,
    accumulate,
    adds_in_place,
    decode_sum,
    encoding,
    mix_seed,
    padded,
    param,
    require,
    sections,
    subtract,
)
from tersegrad.core.pausing import together

_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQ")


@dataclass(frozen=True, repr=False)
class PerTensor(Pausing):
    """Applies ``inner`` to each tensor of the bucket: the result does not depend on how the host makes buckets."""

    examples: ClassVar[tuple[str, ...]] = ("PerTensor(TopK(0.1))", "PerTensor(BF16())", "PerTensor(FFT())")

    inner: Compressor = param(doc="the compressor of each tensor")

    def __post_init__(self) -> None:
        require(self, "inner", Compressor, "Write e.g. AllGather(PerTensor(TopK(0.01))).")
        if isinstance(self.inner, PerTensor):
            raise ValueError("PerTensor(PerTensor(...)): one tensor cannot be split again. Write it once.")

    def traits(self) -> Traits:
        return self.inner.traits()

    def init(self, layout: Layout, seed: int) -> State:
        """One state per tensor."""
        parts: State = {}
        for i, name in enumerate(layout.names):
            part = layout.subset([i])
            inner = self.inner.init(part, mix_seed(seed, part.id))
            parts[f"tensor {name}"] = {"names": [name], "numel": part.numel, "inner": inner}
        return {"parts": parts}

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        """Encode every tensor into its own scratch, all with the same pauses, then pack the payloads."""
        return self._encoding(list(x.split(_sizes(state))), x, state)

    def encoding_sum(self, x: Sum, state: State) -> Paused[Payload]:
        return self._encoding(x.split(_sizes(state)), x.total, state)

    def _encoding(self, tensors: Sequence[Vector], x: Tensor, state: State) -> Paused[Payload]:
        inners = _inners(state)
        payloads: list[Payload] = yield from together(
            *(encoding(self.inner, tensor, inner) for tensor, inner in zip(tensors, inners, strict=True))
        )
        if not all(payload.finite for payload in payloads):
            return Payload.nonfinite(x.numel(), state, x.device)
        table = b"".join(_ENTRY.pack(p.numel, p.body.numel(), len(p.meta)) for p in payloads)
        meta = _COUNT.pack(len(payloads)) + table + b"".join(p.meta for p in payloads)
        whole = Payload.empty(sum(padded(p.body.numel()) for p in payloads), x.numel(), state, x.device, meta)
        bodies = []
        for payload in payloads:
            bodies += [payload.body, payload.body.new_zeros(-payload.body.numel() % 8)]
        if bodies:
            torch.cat(bodies, out=whole.body)
        return whole

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """Decode every tensor into its own slice of ``acc``, after the whole table has been checked."""
        assert adds_in_place(self.inner), "sums in another domain go tensor by tensor: use decode_sum and subtract"
        parts = _parts(payload)
        for part, piece in zip(parts, acc.split([part.numel for part in parts]), strict=True):
            accumulate(self.inner, part, piece, scale)


@decode_sum.register
def _decode_sum(compressor: PerTensor, payloads: list[Payload], scale: float, out: Tensor, state: State) -> bool | None:
    """Sum tensor by tensor, each over all payloads."""
    if not all(payload.finite for payload in payloads):
        out.fill_(math.nan)
        return False
    sizes = _sizes(state)
    tables = [_fitting_parts(payload, sizes) for payload in payloads]
    pieces = zip(out.split(sizes), _inners(state), strict=True)
    finite = [
        decode_sum(compressor.inner, [parts[i] for parts in tables], scale, piece, inner)
        for i, (piece, inner) in enumerate(pieces)
    ]
    return None if None in finite else all(finite)


@subtract.register
def _subtract(compressor: PerTensor, payload: Payload, x: Tensor, state: State) -> None:
    """Subtract each tensor's own payload from that tensor."""
    if not payload.finite:
        x.fill_(math.nan)
        return
    sizes = _sizes(state)
    for sent, piece, inner in zip(_fitting_parts(payload, sizes), x.split(sizes), _inners(state), strict=True):
        subtract(compressor.inner, sent, piece, inner)


@sections.register
def _sections(compressor: PerTensor, payload: Payload) -> dict[str, int]:
    """The sections of all tensors, added up by name."""
    if not payload.finite:
        return {}
    total = {"tensors": padded(len(payload.meta)) + payload.body.numel()}
    for part in _parts(payload):
        for section, size in sections(compressor.inner, part).items():
            total[section] = total.get(section, 0) + size
            total["tensors"] -= size
    return total


def _sizes(state: State) -> list[int]:
    return [part["numel"] for part in state["parts"].values()]


def _inners(state: State) -> list[State]:
    return [part["inner"] for part in state["parts"].values()]


def _fitting_parts(payload: Payload, sizes: list[int]) -> list[Payload]:
    """The payload of each tensor; ValueError unless they have these lengths."""
    parts = _parts(payload)
    if [part.numel for part in parts] != sizes:
        raise ValueError(
            f"a payload of {payload.numel} elements in {len(parts)} tensors, and {sum(sizes)} in {len(sizes)} tensors "
            "of other lengths are expected."
        )
    return parts


def _parts(payload: Payload) -> list[Payload]:
    """The payload of each tensor; ValueError unless they add up to the whole payload exactly."""
    meta, size = payload.meta, payload.body.numel()
    (count,) = _COUNT.unpack_from(meta) if len(meta) >= _COUNT.size else (0,)
    table_end = _COUNT.size + _ENTRY.size * count
    if len(meta) < table_end:
        raise ValueError(f"{len(meta)} bytes of meta are too short for a table of {count} tensors.")
    table = list(_ENTRY.iter_unpack(meta[_COUNT.size : table_end]))
    numel, nbytes = sum(n for n, _, _ in table), sum(padded(b) for _, b, _ in table)
    metas = table_end + sum(m for _, _, m in table)
    if (numel, nbytes, metas) != (payload.numel, size, len(meta)):
        raise ValueError(
            f"the table of {count} tensors adds up to {numel} elements in {nbytes} bytes; "
            f"the payload has {payload.numel} in {size}."
        )
    parts, start = [], 0
    for length, body_nbytes, meta_nbytes in table:
        body = payload.body[start : start + body_nbytes]
        parts.append(Payload(body, length, meta[table_end : table_end + meta_nbytes]))
        start, table_end = start + padded(body_nbytes), table_end + meta_nbytes
    return parts
