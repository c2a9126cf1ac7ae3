"""What all sparse methods share: a selector picks positions, one index codec and any value codec pack them.

Body: number of elements sent (8 bytes), bytes of the indices (8), indices padded to 8, values.
"""

import struct
from abc import abstractmethod

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.codecs import indices as index_codec
from tersegrad.core import Bucket, Compressor, Payload, State, require, scratch

_PREFIX = struct.Struct("<QQ")


class Sparse(Compressor):
    """decode(encode(x)) is x (as the value codec rounds it) at the selected positions, and 0 elsewhere."""

    values: Compressor  # the codec of the selected values

    def __post_init__(self) -> None:
        require(self, "values", Compressor, "Write e.g. values=BF16().")
        if any(isinstance(inner, Sparse) for inner in self.values.walk()):
            raise ValueError(
                f"{type(self).__name__}: values={self.values!r} would drop values after they were selected."
            )

    @abstractmethod
    def select(self, x: Tensor, state: State) -> Tensor | None:
        """The positions to send, int32, ascending, in the state's scratch; None if ``x`` is seen not to be finite.

        A NaN or an infinity counts as larger than every number: if there is one and it was not seen, it is among
        those chosen.
        """

    def init(self, bucket: Bucket, seed: int) -> State:
        """The value codec's state."""
        return {"values": self.values.init(bucket, seed)}

    def encode(self, x: Tensor, state: State) -> Payload:
        """Select, then pack."""
        if x.numel() >= 2**31:
            raise ValueError(
                f"{x.numel()} elements in one bucket; sparse methods index with 32 bits. Use smaller buckets."
            )
        chosen = self.select(x, state)
        if chosen is None:
            return Payload.nonfinite(x.numel(), state, x.device)
        state["_sent"], state["_of"] = chosen.numel(), x.numel()
        picked = scratch(state, "picked", chosen.numel(), torch.float32, x.device)
        kernels.on(x).gather(x, chosen, picked)
        if not kernels.on(x).all_finite(picked):
            return Payload.nonfinite(x.numel(), state, x.device)
        return self._pack(chosen, self.values.encode(picked, state["values"]), x.numel(), state)

    def _pack(self, chosen: Tensor, values: Payload, numel: int, state: State) -> Payload:
        room = index_codec.max_nbytes(chosen.numel(), numel)
        payload = Payload.empty(_PREFIX.size + _padded(room) + values.body.numel(), numel, state, chosen.device)
        used = index_codec.encode(chosen, numel, payload.body[_PREFIX.size :])
        prefix = bytearray(_PREFIX.pack(chosen.numel(), used))
        payload.body[: _PREFIX.size].copy_(torch.frombuffer(prefix, dtype=torch.uint8))
        payload.body[_PREFIX.size + used : _PREFIX.size + _padded(used)].zero_()
        start = _PREFIX.size + _padded(used)
        payload.body[start : start + values.body.numel()].copy_(values.body)
        return payload.trim(start + values.body.numel())

    def add_decoded(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc[indices] += scale * values``, O(number sent); everything is checked before ``acc`` is touched."""
        count, used = _read_prefix(payload)
        start = _PREFIX.size + _padded(used)
        chosen = torch.empty(count, dtype=torch.int32, device=acc.device)
        index_codec.decode(payload.body[_PREFIX.size : _PREFIX.size + used], count, payload.numel, chosen)
        values = torch.zeros(count, dtype=torch.float32, device=acc.device)
        self.values.accumulate(Payload(payload.body[start:], count), values)
        kernels.on(acc).scatter_add(acc, chosen, values, scale)

    def sections(self, payload: Payload) -> dict[str, int]:
        """Bytes of counts and padding, indices and values."""
        if not payload.finite:
            return {}
        _, used = _read_prefix(payload)
        start = _PREFIX.size + _padded(used)
        return {"counts": start - used, "indices": used, "values": payload.body.numel() - start}


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _read_prefix(payload: Payload) -> tuple[int, int]:
    if payload.body.numel() < _PREFIX.size:
        raise ValueError(f"a sparse body has at least {_PREFIX.size} bytes, and {payload.body.numel()} came.")
    count, used = _PREFIX.unpack(bytes(payload.body[: _PREFIX.size].tolist()))
    room = payload.body.numel() - _PREFIX.size
    if count > payload.numel or _padded(used) > room:
        raise ValueError(
            f"a sparse body of {payload.body.numel()} bytes for {payload.numel} elements announces {count} elements "
            f"and {used} bytes of indices."
        )
    return count, used
