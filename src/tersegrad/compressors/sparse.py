"""What all sparse methods share: a selector picks positions, one index codec and any value codec pack them.

Body: number of positions sent (8 bytes), bytes of the indices (8), indices padded to 8, values.
"""

import math
import struct
from abc import abstractmethod

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import indices as index_codec
from tersegrad.core import Bucket, Compressor, Payload, State, require, scratch

FEW = 0.125  # of the elements, all workers together: payloads of so many are unpacked side by side
_PREFIX = struct.Struct("<QQ")


class Selective(Compressor):
    """A body that says some positions of a universe, and the values there: one or more a position."""

    values: Compressor  # the codec of the selected values

    def __post_init__(self) -> None:
        require(self, "values", Compressor, "Write e.g. values=BF16().")
        if any(isinstance(inner, Selective) for inner in self.values.walk()):
            raise ValueError(
                f"{type(self).__name__}: values={self.values!r} would drop values after they were selected."
            )

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        """If the value codec does."""
        return self.values.contracts

    def init(self, bucket: Bucket, seed: int) -> State:
        """The value codec's state."""
        return {"values": self.values.init(bucket, seed)}

    def _pack(self, chosen: Tensor, values: Payload, numel: int, state: State, universe: int | None = None) -> Payload:
        """A payload for a vector of ``numel`` elements; positions are among these, or in a universe of their own."""
        universe = numel if universe is None else universe
        room = index_codec.max_nbytes(chosen.numel(), universe)
        payload = Payload.empty(_PREFIX.size + _padded(room) + values.body.numel(), numel, state, chosen.device)
        used = index_codec.encode(chosen, universe, payload.body[_PREFIX.size :])
        prefix = bytearray(_PREFIX.pack(chosen.numel(), used))
        payload.body[: _PREFIX.size].copy_(torch.frombuffer(prefix, dtype=torch.uint8))
        payload.body[_PREFIX.size + used : _PREFIX.size + _padded(used)].zero_()
        start = _PREFIX.size + _padded(used)
        payload.body[start : start + values.body.numel()].copy_(values.body)
        return payload.trim(start + values.body.numel())

    def _unpack(self, payload: Payload, universe: int, each: int = 1) -> tuple[Tensor, Tensor]:
        """Positions, and ``each`` values for every one of them; all of the body is checked."""
        count, used = _read_prefix(payload, universe)
        device = payload.body.device
        chosen = torch.empty(count, dtype=torch.int32, device=device)
        values = torch.empty(each * count, dtype=torch.float32, device=device)
        self._unpack_into(payload, used, universe, chosen, values)
        return chosen, values

    def _unpack_into(self, payload: Payload, used: int, universe: int, chosen: Tensor, values: Tensor) -> None:
        """As ``_unpack``, where the prefix was read."""
        index_codec.decode(payload.body[_PREFIX.size : _PREFIX.size + used], chosen.numel(), universe, chosen)
        start = _PREFIX.size + _padded(used)
        self.values.accumulate(Payload(payload.body[start:], values.numel()), values.zero_())

    def sections(self, payload: Payload) -> dict[str, int]:
        """Bytes of counts and padding, indices and values."""
        if not payload.finite:
            return {}
        _, used = _read_prefix(payload, payload.numel)
        start = _PREFIX.size + _padded(used)
        return {"counts": start - used, "indices": used, "values": payload.body.numel() - start}


class Sparse(Selective):
    """decode(encode(x)) is x (as the value codec rounds it) at the selected positions, and 0 elsewhere."""

    @abstractmethod
    def select(self, x: Tensor, state: State) -> Tensor | None:
        """The positions to send, int32, ascending, in the state's scratch; None if ``x`` is seen not to be finite.

        A NaN or an infinity counts as larger than every number: if there is one and it was not seen, it is among
        those chosen.
        """

    def select_sum(self, a: Tensor, b: Tensor, total: Tensor, state: State) -> Tensor | None:
        """``total = a + b``, and the positions to send of it; by default one after the other."""
        kernels.on(total).add_scaled(a, b, 1.0, total)
        return self.select(total, state)

    def encode(self, x: Tensor, state: State) -> Payload:
        """Select, then pack."""
        require_int32(x)
        return self._encode_chosen(x, self.select(x, state), state)

    def encode_sum(self, a: Tensor, b: Tensor, total: Tensor, state: State) -> Payload:
        """Add and select, then pack."""
        require_int32(total)
        return self._encode_chosen(total, self.select_sum(a, b, total, state), state)

    def _encode_chosen(self, x: Tensor, chosen: Tensor | None, state: State) -> Payload:
        if chosen is None:
            return Payload.nonfinite(x.numel(), state, x.device)
        state["_sent"], state["_of"] = chosen.numel(), x.numel()
        picked = scratch(state, "picked", chosen.numel(), torch.float32, x.device)
        kernels.on(x).gather(x, chosen, picked)
        if not kernels.on(x).all_finite(picked):
            return Payload.nonfinite(x.numel(), state, x.device)
        return self._pack(chosen, self.values.encode(picked, state["values"]), x.numel(), state)

    def add_decoded(self, payload: Payload, acc: Tensor, scale: float) -> bool:
        """``acc[indices] += scale * values``, O(number sent); everything is checked before ``acc`` is touched."""
        chosen, values = self._unpack(payload, payload.numel)
        finite: bool = kernels.on(acc).scatter_add(acc, chosen, values, scale)
        return finite

    def sum_decoded(self, payloads: list[Payload], scale: float, out: Tensor, state: State) -> bool | None:
        """In one pass over ``out`` if few of its elements were sent; everything is checked before it is touched."""
        for payload in payloads:
            self._check_length(payload, out)
        if not all(payload.finite for payload in payloads):
            out.fill_(math.nan)
            return False
        prefixes = [_read_prefix(payload, payload.numel) for payload in payloads]
        counts = [count for count, _ in prefixes]
        if sum(counts) > FEW * out.numel():
            return super().sum_decoded(payloads, scale, out, state)
        chosen = scratch(state, "all chosen", sum(counts), torch.int32, out.device)
        values = scratch(state, "all values", sum(counts), torch.float32, out.device)
        parts = zip(payloads, prefixes, chosen.split(counts), values.split(counts), strict=True)
        for payload, (_, used), positions, part in parts:
            self._unpack_into(payload, used, payload.numel, positions, part)
        finite: bool = kernels.on(out).scatter_sum(chosen, values, counts, scale, out)
        return finite


def require_int32(x: Tensor) -> None:
    """Refuses a vector that is too long for positions of 32 bits."""
    if x.numel() >= 2**31:
        raise ValueError(f"{x.numel()} elements in one bucket; sparse methods index with 32 bits. Use smaller buckets.")


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _read_prefix(payload: Payload, universe: int) -> tuple[int, int]:
    if payload.body.numel() < _PREFIX.size:
        raise ValueError(f"a sparse body has at least {_PREFIX.size} bytes, and {payload.body.numel()} came.")
    count, used = _PREFIX.unpack(bytes(payload.body[: _PREFIX.size].tolist()))
    room = payload.body.numel() - _PREFIX.size
    if count > universe or _padded(used) > room:
        raise ValueError(
            f"a sparse body of {payload.body.numel()} bytes for {universe} positions announces {count} of them "
            f"and {used} bytes of indices."
        )
    return count, used
