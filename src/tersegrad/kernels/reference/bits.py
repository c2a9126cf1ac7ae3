"""Codes of 1 to 16 bits, packed into bytes, in plain torch: the definition fast kernels must meet.

Little-endian throughout: code i occupies bits i * N to i * N + N - 1, its lowest bit first, and bit j is bit j % 8 of
byte j // 8. So n codes take ceil(n * N / 8) bytes, and eight of them exactly N. Bits after the last code are zero.
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import check_packed
from tersegrad.kernels.ops import packed_nbytes as packed_nbytes

__all__ = ["pack_bits", "packed_nbytes", "unpack_bits"]


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write the lowest ``bits`` bits of each code (uint8 or int32) to ``out`` (uint8), which has just their size.

    >>> out = torch.empty(2, dtype=torch.uint8)
    >>> pack_bits(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8), 3, out)
    >>> [f"{byte:08b}" for byte in out.tolist()]  # 1, 2, 3, 4, 5 from right to left
    ['11010001', '01011000']
    """
    check_packed(codes, bits, out)
    ones = codes.to(torch.int32).unsqueeze(1) >> torch.arange(bits, device=codes.device) & 1
    padded = torch.zeros(8 * out.numel(), dtype=torch.int32, device=codes.device)
    padded[: ones.numel()] = ones.flatten()
    out.copy_((padded.view(-1, 8) << torch.arange(8, device=codes.device)).sum(1))


def unpack_bits(data: Tensor, bits: int, codes: Tensor) -> None:
    """Read ``len(codes)`` codes (uint8 or int32) from ``data``, which has exactly as many bytes as they take.

    >>> codes = torch.empty(5, dtype=torch.uint8)
    >>> unpack_bits(torch.tensor([0b11010001, 0b01011000], dtype=torch.uint8), 3, codes)
    >>> codes.tolist()
    [1, 2, 3, 4, 5]
    """
    check_packed(codes, bits, data)
    ones = (data.to(torch.int32).unsqueeze(1) >> torch.arange(8, device=data.device) & 1).flatten()
    table = ones[: codes.numel() * bits].view(-1, bits)
    codes.copy_((table << torch.arange(bits, device=data.device)).sum(1))
