"""The map of 256 "dynamic" 8-bit numbers (defined in ``kernels.reference.blockwise``)."""

import torch
from torch import Tensor

__all__ = ["ZERO_CODE", "check_byte_codes", "dynamic_borders", "dynamic_map"]

ZERO_CODE = 127  # the code of zero; that of one is 255


def dynamic_map() -> Tensor:
    """The 256 numbers, ascending, in float64.

    >>> values = dynamic_map()
    >>> values.numel(), values[127].item(), values[255].item(), round(values[254].item(), 6), round(values[0].item(), 6)
    (256, 0.0, 1.0, 0.992969, -0.992969)
    """
    magnitudes = []
    for zeros in range(6, -1, -1):
        parts = 1 << 6 - zeros
        middles = 0.1 + 0.9 * (torch.arange(parts, dtype=torch.float64) + 0.5) / parts
        magnitudes.append(middles * 10.0**-zeros)
    positive = torch.cat(magnitudes)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return torch.cat([-positive.flip(0), ends[:1], positive, ends[1:]])


def dynamic_borders() -> Tensor:
    """The smallest magnitude (float32) that is coded as each of the positions 1 to 128 above zero."""
    upper = dynamic_map()[ZERO_CODE:]
    return ((upper[1:] + upper[:-1]) / 2).to(torch.float32)


def check_byte_codes(n: int, data: Tensor) -> None:
    """Raise ValueError unless ``data`` has one byte per element."""
    if data.numel() != n:
        raise ValueError(f"{n} codes take {n} bytes, not {data.numel()}")
