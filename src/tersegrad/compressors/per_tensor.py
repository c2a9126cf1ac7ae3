"""PerTensor: another compressor on each tensor of the bucket by itself, in one payload.

DDP's cutting of buckets then does not change the result.
Body: number of tensors (8 bytes), then length and body size of each (16), then the bodies, each padded to 8.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad.core import Bucket, Compressor, Payload, State, mix_seed, require, scratch


@dataclass(frozen=True, repr=False)
class PerTensor(Compressor):
    """Applies ``inner`` to each tensor of the bucket: the result does not depend on how DDP cuts buckets."""

    examples: ClassVar[tuple[str, ...]] = ("PerTensor(TopK(0.1))", "PerTensor(BF16())", "PerTensor(FFT())")

    inner: Compressor  # what each tensor is compressed with

    def __post_init__(self) -> None:
        require(self, "inner", Compressor, "Write e.g. AllGather(PerTensor(TopK(0.01))).")
        if isinstance(self.inner, PerTensor):
            raise ValueError("PerTensor(PerTensor(...)): one tensor cannot be cut again. Write it once.")

    @property
    def conserves(self) -> bool:  # type: ignore[override]
        """As ``inner``."""
        return self.inner.conserves

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """As ``inner``."""
        return self.inner.unbiased

    @property
    def contracts(self) -> bool:  # type: ignore[override]
        """As ``inner``."""
        return self.inner.contracts

    def init(self, bucket: Bucket, seed: int) -> State:
        """One state per tensor."""
        parts: State = {}
        for i, name in enumerate(bucket.names):
            part = bucket.subset([i])
            inner = self.inner.init(part, mix_seed(seed, part.id))
            parts[f"tensor {name}"] = {"names": [name], "numel": part.numel, "inner": inner}
        return {"parts": parts}

    def encode(self, x: Tensor, state: State) -> Payload:
        """Encodes every tensor into its own scratch, then packs them."""
        parts = list(state["parts"].values())
        pieces = x.split([part["numel"] for part in parts])
        payloads = [self.inner.encode(piece, part["inner"]) for piece, part in zip(pieces, parts, strict=True)]
        if not all(payload.finite for payload in payloads):
            return Payload.nonfinite(x.numel(), state, x.device)
        table = [len(payloads)]
        bodies = []
        for payload in payloads:
            table += [payload.numel, payload.body.numel()]
            bodies += [payload.body, payload.body.new_zeros(-payload.body.numel() % 8)]
        bodies.insert(0, torch.tensor(table, dtype=torch.int64, device=x.device).view(torch.uint8))
        whole = Payload.empty(sum(body.numel() for body in bodies), x.numel(), state, x.device)
        torch.cat(bodies, out=whole.body)
        return whole

    def accumulate(self, payload: Payload, acc: Tensor, scale: float = 1.0) -> None:
        """As everywhere; only that the table of lengths says how long ``acc`` is."""
        if not payload.finite:
            acc.fill_(math.nan)
            return
        needed = sum(self.inner.accumulator_numel(numel) for numel, _ in _read_table(payload))
        if acc.numel() != needed:
            raise ValueError(
                f"a payload of {payload.numel} elements needs an accumulator of {needed}, "
                f"and this one has {acc.numel()}."
            )
        self.add_decoded(payload, acc, scale)

    def add_decoded(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """Decodes every tensor into its own stretch of ``acc``, once the whole table has been checked."""
        offset = 0
        for part in _parts(payload):
            length = self.inner.accumulator_numel(part.numel)
            self.inner.accumulate(part, acc[offset : offset + length], scale)
            offset += length

    def accumulator(self, out: Tensor, state: State) -> Tensor:
        """The tensors' accumulators side by side: ``out`` itself, if they are as long as the tensors."""
        total = sum(self._lengths(state))
        if total == out.numel():
            return out.zero_()
        return scratch(state, "accumulator", total, torch.float32, out.device).zero_()

    def finish(self, acc: Tensor, out: Tensor, state: State) -> None:
        """Every tensor by itself."""
        parts = list(state["parts"].values())
        pieces = zip(acc.split(self._lengths(state)), out.split([part["numel"] for part in parts]), strict=True)
        for part, (sums, piece) in zip(parts, pieces, strict=True):
            self.inner.finish(sums, piece, part["inner"])

    def remove(self, payload: Payload, x: Tensor, state: State) -> None:
        """Every tensor's own payload from that tensor."""
        if not payload.finite:
            x.fill_(math.nan)
            return
        parts = list(state["parts"].values())
        pieces = x.split([part["numel"] for part in parts])
        for sent, piece, part in zip(_parts(payload), pieces, parts, strict=True):
            self.inner.remove(sent, piece, part["inner"])

    def _lengths(self, state: State) -> list[int]:
        """Of the tensors' accumulators."""
        return [self.inner.accumulator_numel(part["numel"]) for part in state["parts"].values()]

    def sections(self, payload: Payload) -> dict[str, int]:
        """The sections of all tensors together."""
        if not payload.finite:
            return {}
        total = {"tensors": payload.body.numel()}
        for part in _parts(payload):
            for section, size in self.inner.sections(part).items():
                total[section] = total.get(section, 0) + size
            total["tensors"] -= part.body.numel()
        return total


def _parts(payload: Payload) -> list[Payload]:
    """Every tensor's own payload."""
    table = _read_table(payload)
    start, parts = 8 + 16 * len(table), []
    for numel, nbytes in table:
        parts.append(Payload(payload.body[start : start + nbytes], numel))
        start += nbytes + -nbytes % 8
    return parts


def _read_table(payload: Payload) -> list[tuple[int, int]]:
    """(elements, body bytes) of each tensor; adds up to the payload exactly, or is refused."""
    size = payload.body.numel()
    count = int.from_bytes(bytes(payload.body[:8].tolist()), "little")
    if size < 8 or size < 8 + 16 * count:
        raise ValueError(f"a body of {size} bytes is too short for a table of {count} tensors.")
    words = payload.body[8 : 8 + 16 * count].clone().view(torch.int64).tolist()
    table = list(zip(words[::2], words[1::2], strict=True))
    numel = sum(n for n, _ in table)
    nbytes = 8 + 16 * count + sum(b + -b % 8 for _, b in table)
    if any(word < 0 for word in words) or (numel, nbytes) != (payload.numel, size):
        raise ValueError(
            f"the table of {count} tensors adds up to {numel} elements in {nbytes} bytes; "
            f"the payload has {payload.numel} in {size}."
        )
    return table
