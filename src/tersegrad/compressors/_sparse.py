"""Base of all sparse methods: a selector picks positions, the index codec and a value codec pack them.

Meta: number of positions, form of the indices, bytes of the indices; then the value codec's meta.
Body: the indices, padded to whole words; then the value codec's body.
"""

import math
import struct
from abc import abstractmethod
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors import _indices
from tersegrad.core import (
    Compressor,
    Layout,
    Paused,
    Pausing,
    Payload,
    State,
    Sum,
    Traits,
    accumulate,
    decode_sum,
    encoding,
    padded,
    report,
    require,
    require_length,
    scratch,
    sections,
    subtract,
)
from tersegrad.core.pausing import ask, run, together

FEW = 0.125  # share of the elements, summed over workers, up to which payloads are decoded in one pass
_META = struct.Struct("<IBxxxQ")


class _Front(NamedTuple):
    """The sparse part of a payload's meta."""

    positions: int
    form: int
    nbytes: int

    @property
    def values_start(self) -> int:
        return padded(self.nbytes)


class Selection(NamedTuple):
    """What a selector has found."""

    positions: Tensor  # int32, ascending
    found: kernels.Answer = 0  # negative if the vector is non-finite; then the positions are just some within it


class Selective(Pausing):
    """A payload of some positions of a universe, and one or more values per position."""

    values: Compressor  # the codec of the selected values

    def __post_init__(self) -> None:
        require(self, "values", Compressor, "Write e.g. values=BF16().")
        if any(isinstance(inner, Selective) for inner in self.values.walk()):
            raise ValueError(
                f"{type(self).__name__}: values={self.values!r} would drop values after they were selected."
            )

    def traits(self) -> Traits:
        return Traits(contracts=self.values.traits().contracts)

    def init(self, layout: Layout, seed: int) -> State:
        return {"values": self.values.init(layout, seed)}

    def _packing(
        self,
        selected: Selection,
        picked: Tensor,
        numel: int,
        state: State,
        universe: int | None = None,
        bitmap: bool = False,
    ) -> Paused[Payload]:
        """The payload of these values for a vector of ``numel`` elements; non-finite if one of them is.

        Positions index the vector, or another universe if one is given. They are sent in the smallest form, or as a
        bitmap if one is asked for.
        """
        chosen, universe = selected.positions, numel if universe is None else universe
        plan = _indices.plan(chosen, universe)
        values, (found, finite, bits) = yield from together(
            encoding(self.values, picked, state["values"]),
            ask(selected.found, kernels.on(picked).all_finite(picked), plan.bits),
        )
        if found < 0 or not finite:
            return Payload.nonfinite(numel, state, picked.device)
        most = -(-universe // 8) if bitmap else _indices.max_nbytes(chosen.numel(), universe)
        capacity = padded(most) + values.body.numel()
        meta = bytes(_META.size) + values.meta
        payload = Payload.empty(capacity, numel, state, chosen.device, meta)
        if bitmap:
            form, nbytes = _indices.encode_bitmap(chosen, universe, payload.body)
        else:
            form, nbytes = _indices.encode(chosen, universe, payload.body, replace(plan, bits=int(bits)))
        start = padded(nbytes)
        payload.body[nbytes:start].zero_()
        payload.body[start : start + values.body.numel()].copy_(values.body)
        payload.meta = _META.pack(chosen.numel(), form, nbytes) + values.meta
        return payload.trim(start + values.body.numel())

    def _unpack(self, payload: Payload, universe: int, each: int = 1) -> tuple[Tensor, Tensor]:
        """Positions, and ``each`` values per position; the whole payload is checked."""
        front, device = read_front(payload, universe), payload.body.device
        chosen = torch.empty(front.positions, dtype=torch.int32, device=device)
        values = torch.empty(each * front.positions, dtype=torch.float32, device=device)
        self._unpack_into(payload, front, universe, chosen, values)
        return chosen, values

    def _unpack_into(self, payload: Payload, front: _Front, universe: int, chosen: Tensor, values: Tensor) -> None:
        _indices.decode(front.form, payload.body[: front.nbytes], front.positions, universe, chosen)
        self._unpack_values(payload, front, values)

    def _unpack_values(self, payload: Payload, front: _Front, values: Tensor) -> None:
        body, meta = payload.body[front.values_start :], payload.meta[_META.size :]
        accumulate(self.values, Payload(body, values.numel(), meta), values.zero_())


class Sparse(Selective):
    """decode(encode(x)) is x (as the value codec rounds it) at the selected positions, and 0 elsewhere."""

    @abstractmethod
    def selecting(self, x: Tensor, state: State) -> Paused[Selection | None]:
        """The positions to send, in the state's scratch; None if ``x`` is known to be non-finite.

        A NaN or an infinity counts as larger than every number, so an undetected one is always among those selected.
        """

    def selecting_sum(self, x: Sum, state: State) -> Paused[Selection | None]:
        """Add up ``x`` and select from the sum; the default does so in two passes."""
        return self.selecting(x.add(), state)

    def select(self, x: Tensor, state: State) -> Tensor | None:
        """The positions alone; None if ``x`` is found to be non-finite."""
        selected = run(self.selecting(x, state))
        if selected is None or any(found < 0 for found in kernels.read(selected.found)):
            return None
        return selected.positions

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        require_int32(x)
        return self._encoding_selected(x, self.selecting(x, state), state)

    def encoding_sum(self, x: Sum, state: State) -> Paused[Payload]:
        require_int32(x.total)
        return self._encoding_selected(x.total, self.selecting_sum(x, state), state)

    def _encoding_selected(self, x: Tensor, selecting: Paused[Selection | None], state: State) -> Paused[Payload]:
        selected = yield from selecting
        if selected is None:
            return Payload.nonfinite(x.numel(), state, x.device)
        chosen = selected.positions
        report(state, sent=chosen.numel(), of=x.numel())
        picked = scratch(state, "picked", chosen.numel(), torch.float32, x.device)
        kernels.on(x).gather(x, chosen, picked)
        payload = yield from self._packing(selected, picked, x.numel(), state)
        state["_encoded"] = payload, chosen
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc[indices] += scale * values``, O(number sent); the whole payload is checked before ``acc`` changes."""
        self._scatter(payload, acc, scale)

    def _scatter(self, payload: Payload, acc: Tensor, scale: float) -> kernels.Answer:
        """``decode_add``; returns whether all elements that it changed are finite."""
        chosen, values = self._unpack(payload, payload.numel)
        finite: kernels.Answer = kernels.on(acc).scatter_add(acc, chosen, values, scale)
        return finite


@subtract.register
def _subtract(compressor: Sparse, payload: Payload, x: Tensor, state: State) -> None:
    """The positions of the last payload are kept in scratch, so only its values are decoded."""
    encoded, chosen = state.get("_encoded", (None, None))
    if encoded is not payload or not payload.finite:
        accumulate(compressor, payload, x, -1.0)
        return
    values = scratch(state, "own values", chosen.numel(), torch.float32, x.device)
    compressor._unpack_values(payload, read_front(payload, payload.numel), values)
    kernels.on(x).scatter_add(x, chosen, values, -1.0)


@decode_sum.register
def _decode_sum(compressor: Sparse, payloads: list[Payload], scale: float, out: Tensor, state: State) -> bool:
    """In one pass over ``out`` if few elements were sent; all payloads are checked before ``out`` changes."""
    for payload in payloads:
        require_length(compressor, payload, out)
    if not all(payload.finite for payload in payloads):
        out.fill_(math.nan)
        return False
    fronts = [read_front(payload, payload.numel) for payload in payloads]
    counts = [front.positions for front in fronts]
    if sum(counts) > FEW * out.numel():
        out.zero_()
        return all(kernels.read(*[compressor._scatter(payload, out, scale) for payload in payloads]))
    chosen = scratch(state, "all chosen", sum(counts), torch.int32, out.device)
    values = scratch(state, "all values", sum(counts), torch.float32, out.device)
    parts = zip(payloads, fronts, chosen.split(counts), values.split(counts), strict=True)
    for payload, front, positions, part in parts:
        compressor._unpack_into(payload, front, payload.numel, positions, part)
    return all(kernels.read(kernels.on(out).scatter_sum(chosen, values, counts, scale, out)))


@sections.register
def _sections(compressor: Selective, payload: Payload) -> dict[str, int]:
    if not payload.finite:
        return {}
    front = read_front(payload, payload.numel)
    counts = padded(len(payload.meta)) + front.values_start - front.nbytes
    return {"counts": counts, "indices": front.nbytes, "values": payload.body.numel() - front.values_start}


def require_int32(x: Tensor) -> None:
    """Raise ValueError if a vector is too long for positions of 32 bits."""
    if x.numel() >= 2**31:
        raise ValueError(f"{x.numel()} elements in one bucket; sparse methods index with 32 bits. Use smaller buckets.")


def read_front(payload: Payload, universe: int) -> _Front:
    """The sparse part of a payload's meta; ValueError if it does not fit the universe or the body."""
    if len(payload.meta) < _META.size:
        raise ValueError(f"a sparse payload has at least {_META.size} bytes of meta, got {len(payload.meta)}.")
    front = _Front(*_META.unpack_from(payload.meta))
    if front.positions > universe or front.values_start > payload.body.numel():
        raise ValueError(
            f"a sparse body of {payload.body.numel()} bytes for {universe} positions announces {front.positions} of "
            f"them and {front.nbytes} bytes of indices."
        )
    return front
