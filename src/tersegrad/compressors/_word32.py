"""The layout of the papers: one 32-bit word per element sent, the code in its high bits, the index in its low bits.

It exists to compare ratios with published ones; the index codec needs a quarter of the bytes.
Meta: how many elements of each group were sent (4 bytes), then the groups' lengths (8).
Body: the groups' numbers, padded to whole words of 8 bytes; then the 32-bit words.
"""

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._fixed_width import (
    FixedWidth,
    codes_below,
    group_lengths,
    lengths_meta,
    put_numbers,
    read_lengths,
    read_numbers,
)
from tersegrad.core import Payload, State, padded


def pack(
    codec: FixedWidth,
    picked: Tensor,
    positions: Tensor,
    offsets: Tensor,
    numel: int,
    state: State,
    largest: Tensor | None = None,
) -> Payload:
    """The payload of values picked at ascending positions of a vector; its groups begin at these offsets.

    ``largest``: a magnitude for each group that counts as one of its values, for codes relative to their group's
    largest.
    """
    sizes = offsets.diff()
    room = 1 << (32 - codec.bits)
    if int(sizes.max()) > room:
        raise ValueError(f"a tensor of more than {room} elements has indices that do not fit beside {codec.bits} bits.")
    groups = group_lengths(positions, offsets)
    codes, numbers = codec.to_codes(picked, groups) if largest is None else codes_below(codec, picked, groups, largest)
    within = positions.to(torch.int64) - offsets[:-1].repeat_interleave(groups)
    words = ((codes.to(torch.int64) << (32 - codec.bits)) | within).to(torch.uint32).view(torch.uint8)
    meta = lengths_meta(groups) + sizes.to("cpu", torch.int64).numpy().tobytes()
    payload = Payload.empty(padded(numbers.numel()) + words.numel(), numel, state, picked.device, meta)
    put_numbers(numbers, payload.body)
    payload.body[padded(numbers.numel()) :].copy_(words)
    return payload


def unpack(codec: FixedWidth, payload: Payload, acc: Tensor, scale: float) -> None:
    """``acc[position] += scale * value`` for every word, after all of them have been checked."""
    groups, sizes = _read_meta(payload.meta, acc)
    numbers, start = read_numbers(payload.body, groups.numel() * codec.group_nbytes)
    count = sum(groups.tolist())
    if payload.body.numel() != start + 4 * count:
        raise ValueError(f"{payload.body.numel()} bytes do not hold {count} words after {start} bytes of groups.")
    words = payload.body[start:].clone().view(torch.uint32).to(torch.int64)
    within = words & ((1 << (32 - codec.bits)) - 1)
    if bool((within >= sizes.repeat_interleave(groups)).any()):
        raise ValueError("a word points outside its group.")
    positions = within + (sizes.cumsum(0) - sizes).repeat_interleave(groups)
    codes = (words >> (32 - codec.bits)).to(torch.uint8)
    values = codec.from_codes(codes, groups, numbers)
    kernels.on(acc).scatter_add(acc, positions.to(torch.int32), values, scale)


def _read_meta(meta: bytes, acc: Tensor) -> tuple[Tensor, Tensor]:
    """How many elements of each group were sent, and the groups' lengths."""
    if len(meta) % 12:
        raise ValueError(f"{len(meta)} bytes are not a table of counts and lengths of 12 bytes each.")
    split = len(meta) // 3
    groups = read_lengths(meta[:split], acc.device)
    sizes = torch.frombuffer(bytearray(meta[split:]), dtype=torch.int64) if meta else groups.to("cpu", torch.int64)
    if groups.numel() and (int(sizes.min()) < 0 or int(sizes.max()) > acc.numel() or int(sizes.sum()) != acc.numel()):
        raise ValueError(f"groups of {sizes.tolist()} elements do not make a vector of {acc.numel()}.")
    return groups, sizes.to(acc.device)
