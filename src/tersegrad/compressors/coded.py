"""What value codecs of a few bits share: one code an element, read against a number or none of the element's group.

Body: number of groups (8 bytes), length of each (4), the groups' numbers, padding to 8, the codes side by side.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Compressor, Payload, State
from tersegrad.kernels.reference.bits import packed_nbytes


class Coded(Compressor):
    """One code of ``bits`` bits an element. A group is the whole vector, or what the caller says.

    A caller that knows groups, one after the other in the vector, puts their lengths into ``state["_groups"]`` (int32).
    """

    bits: ClassVar[int]  # of one code
    group_nbytes: ClassVar[int]  # of the numbers of one group

    @abstractmethod
    def to_codes(self, values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (uint8) of the values, and the groups' numbers (uint8, ``group_nbytes`` each)."""

    @abstractmethod
    def from_codes(self, codes: Tensor, groups: Tensor, numbers: Tensor) -> Tensor:
        """What codes stand for, float32; every combination of bits means something finite."""

    def encode(self, x: Tensor, state: State) -> Payload:
        """Groups, their numbers, codes."""
        if not kernels.on(x).all_finite(x):
            return Payload.nonfinite(x.numel(), state, x.device)
        groups = state.get("_groups")
        if groups is None:
            groups = torch.tensor([x.numel()], dtype=torch.int32, device=x.device)
        codes, numbers = self.to_codes(x, groups)
        head = head_of(groups, numbers)
        payload = Payload.empty(head.numel() + packed_nbytes(x.numel(), self.bits), x.numel(), state, x.device)
        payload.body[: head.numel()].copy_(head)
        kernels.on(x).pack_bits(codes, self.bits, payload.body[head.numel() :])
        return payload

    def add_decoded(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * values``."""
        groups, numbers, start = read_head(payload.body, self.group_nbytes)
        if int(groups.sum()) != acc.numel() or payload.body.numel() != start + packed_nbytes(acc.numel(), self.bits):
            raise ValueError(
                f"{payload.body.numel()} bytes with groups of {int(groups.sum())} elements do not stand for "
                f"{acc.numel()} codes of {self.bits} bits."
            )
        codes = torch.empty(acc.numel(), dtype=torch.uint8, device=acc.device)
        kernels.on(acc).unpack_bits(payload.body[start:], self.bits, codes)
        acc.add_(self.from_codes(codes, groups, numbers), alpha=scale)

    def sections(self, payload: Payload) -> dict[str, int]:
        """Bytes of groups and codes."""
        if not payload.finite:
            return {}
        _, _, start = read_head(payload.body, self.group_nbytes)
        return {"groups": start, "codes": payload.body.numel() - start}


def group_lengths(positions: Tensor, offsets: Tensor) -> Tensor:
    """How many of the positions (ascending) lie in each stretch between two offsets.

    >>> group_lengths(torch.tensor([0, 4, 5]), torch.tensor([0, 3, 9]))
    tensor([1, 2], dtype=torch.int32)
    """
    return torch.searchsorted(positions, offsets).diff().to(torch.int32)


def head_of(groups: Tensor, numbers: Tensor) -> Tensor:
    """The groups' part of a body."""
    count = torch.tensor([groups.numel()], device=groups.device).view(torch.uint8)
    head = torch.cat([count, groups.to(torch.int32).view(torch.uint8), numbers])
    return torch.nn.functional.pad(head, (0, -head.numel() % 8))


def read_head(body: Tensor, group_nbytes: int) -> tuple[Tensor, Tensor, int]:
    """Lengths and numbers of the groups, and where the head ends; refuses what does not add up."""
    count = int.from_bytes(bytes(body[:8].tolist()), "little")
    end = 8 + (4 + group_nbytes) * count
    if body.numel() < 8 or body.numel() < end + -end % 8:
        raise ValueError(f"a body of {body.numel()} bytes is too short for {count} groups.")
    groups = body[8 : 8 + 4 * count].clone().view(torch.int32)
    if count and int(groups.min()) < 0:
        raise ValueError(f"a group of {int(groups.min())} elements.")
    return groups, body[8 + 4 * count : end], end + -end % 8
