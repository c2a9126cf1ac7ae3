"""Words: the papers' own layout, one 32-bit word per element sent: its code in front, its index behind.

It is here so that ratios can be compared with published ones; the index codec needs a quarter of the bytes.
Body: the groups as in ``coded``, then the words.
"""

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.coded import Coded, group_lengths, head_of, read_head
from tersegrad.core import Payload, State


def pack(codec: Coded, picked: Tensor, positions: Tensor, offsets: Tensor, numel: int, state: State) -> Payload:
    """The payload of values picked at positions (ascending) of a vector of groups that begin at offsets."""
    room = 1 << (32 - codec.bits)
    if int(offsets.diff().max()) > room:
        raise ValueError(f"a tensor of more than {room} elements has indices that do not fit beside {codec.bits} bits.")
    groups = group_lengths(positions, offsets)
    codes, numbers = codec.to_codes(picked, groups)
    within = positions.to(torch.int64) - offsets[:-1].repeat_interleave(groups)
    words = ((codes.to(torch.int64) << (32 - codec.bits)) | within).to(torch.uint32).view(torch.uint8)
    head = head_of(groups, numbers)
    sizes = torch.tensor(offsets.diff().tolist(), device=picked.device).view(torch.uint8)
    payload = Payload.empty(head.numel() + sizes.numel() + words.numel(), numel, state, picked.device)
    torch.cat([head, sizes, words], out=payload.body)
    return payload


def unpack(codec: Coded, payload: Payload, acc: Tensor, scale: float) -> None:
    """``acc[position] += scale * value`` for every word, once all have been checked."""
    groups, numbers, start = read_head(payload.body, codec.group_nbytes)
    end = start + 8 * groups.numel()
    count = int(groups.sum())
    if payload.body.numel() != end + 4 * count:
        raise ValueError(f"{payload.body.numel()} bytes do not hold {count} words after {end} bytes of groups.")
    sizes = payload.body[start:end].clone().view(torch.int64)
    if groups.numel() and (int(sizes.min()) < 0 or int(sizes.max()) > acc.numel() or int(sizes.sum()) != acc.numel()):
        raise ValueError(f"groups of {sizes.tolist()} elements do not make a vector of {acc.numel()}.")
    words = payload.body[end:].clone().view(torch.uint32).to(torch.int64)
    within = words & ((1 << (32 - codec.bits)) - 1)
    if bool((within >= sizes.repeat_interleave(groups)).any()):
        raise ValueError("a word points outside its group.")
    positions = within + (sizes.cumsum(0) - sizes).repeat_interleave(groups)
    codes = (words >> (32 - codec.bits)).to(torch.uint8)
    values = codec.from_codes(codes, groups, numbers)
    kernels.on(acc).scatter_add(acc, positions.to(torch.int32), values, scale)
