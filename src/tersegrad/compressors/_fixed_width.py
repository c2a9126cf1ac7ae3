"""Base of value codecs with a fixed number of bits per element, and optional numbers (such as an exponent) per group.

Meta: the length of each group (4 bytes). Body: the groups' numbers, padded to whole words; the packed codes.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Paused, Pausing, Payload, State, padded, sections
from tersegrad.kernels.ops import packed_nbytes


class FixedWidth(Pausing):
    """One code of ``bits`` bits per element. By default the whole vector is one group.

    A caller that splits the vector into consecutive groups puts their lengths into ``state["_groups"]`` (int32).
    """

    bits: ClassVar[int]  # per code
    group_nbytes: ClassVar[int]  # bytes of the numbers of one group

    @abstractmethod
    def to_codes(self, values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """The codes (uint8) of the values, and the groups' numbers (uint8, ``group_nbytes`` each)."""

    @abstractmethod
    def from_codes(self, codes: Tensor, groups: Tensor, numbers: Tensor) -> Tensor:
        """The values (float32) that the codes stand for; every combination of bits stands for a finite value."""

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        (finite,) = yield (kernels.on(x).all_finite(x),)
        if not finite:
            return Payload.nonfinite(x.numel(), state, x.device)
        groups = state.get("_groups")
        if groups is None:
            groups = torch.tensor([x.numel()], dtype=torch.int32, device=x.device)
        codes, numbers = self.to_codes(x, groups)
        start = padded(numbers.numel())
        nbytes = start + packed_nbytes(x.numel(), self.bits)
        payload = Payload.empty(nbytes, x.numel(), state, x.device, lengths_meta(groups))
        put_numbers(numbers, payload.body)
        kernels.on(x).pack_bits(codes, self.bits, payload.body[start:])
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        groups = read_lengths(payload.meta, acc.device)
        numbers, start = read_numbers(payload.body, groups.numel() * self.group_nbytes)
        total = sum(groups.tolist())
        if total != acc.numel() or payload.body.numel() != start + packed_nbytes(acc.numel(), self.bits):
            raise ValueError(
                f"{payload.body.numel()} bytes with groups of {total} elements do not stand for "
                f"{acc.numel()} codes of {self.bits} bits."
            )
        codes = torch.empty(acc.numel(), dtype=torch.uint8, device=acc.device)
        kernels.on(acc).unpack_bits(payload.body[start:], self.bits, codes)
        acc.add_(self.from_codes(codes, groups, numbers), alpha=scale)


@sections.register
def _sections(compressor: FixedWidth, payload: Payload) -> dict[str, int]:
    if not payload.finite:
        return {}
    codes = packed_nbytes(payload.numel, compressor.bits)
    return {"groups": padded(len(payload.meta)) + payload.body.numel() - codes, "codes": codes}


def codes_below(codec: FixedWidth, values: Tensor, groups: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """``codec.to_codes``, as if the last value of each group were ``largest``, whose own code is left out."""
    group = torch.arange(groups.numel(), device=values.device)
    at = torch.arange(values.numel(), device=values.device) + group.repeat_interleave(groups)
    extended = values.new_empty(values.numel() + groups.numel())
    extended[at] = values
    extended[groups.cumsum(0) + group] = largest
    codes, numbers = codec.to_codes(extended, groups + 1)
    return codes[at], numbers


def group_lengths(positions: Tensor, offsets: Tensor) -> Tensor:
    """How many of the positions (ascending) lie between each two consecutive offsets.

    >>> group_lengths(torch.tensor([0, 4, 5]), torch.tensor([0, 3, 9]))
    tensor([1, 2], dtype=torch.int32)
    """
    return torch.searchsorted(positions, offsets).diff().to(torch.int32)


def lengths_meta(groups: Tensor) -> bytes:
    """The lengths of groups as host bytes."""
    return groups.to("cpu", torch.int32).numpy().tobytes()


def read_lengths(meta: bytes, device: torch.device) -> Tensor:
    """The lengths that ``lengths_meta`` wrote; ValueError if the bytes are malformed or a length is negative."""
    if len(meta) % 4:
        raise ValueError(f"{len(meta)} bytes are not a table of lengths of 4 bytes each.")
    groups = torch.frombuffer(bytearray(meta), dtype=torch.int32) if meta else torch.empty(0, dtype=torch.int32)
    if groups.numel() and int(groups.min()) < 0:
        raise ValueError(f"a group length must not be negative, got {int(groups.min())}.")
    return groups.to(device)


def put_numbers(numbers: Tensor, body: Tensor) -> None:
    """Write the groups' numbers to the front of a body, padded with zeros to a whole word."""
    body[: numbers.numel()].copy_(numbers)
    body[numbers.numel() : padded(numbers.numel())].zero_()


def read_numbers(body: Tensor, nbytes: int) -> tuple[Tensor, int]:
    """The groups' numbers, and where their padding ends."""
    if body.numel() < padded(nbytes):
        raise ValueError(f"a body of {body.numel()} bytes is too short for {nbytes} bytes of groups.")
    return body[:nbytes], padded(nbytes)
