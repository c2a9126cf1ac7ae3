"""Eight bits per element from a fixed map of 256 numbers, and a scale per block; in plain torch: the definition.

The map (``dynamic_map``) is that of "dynamic" 8-bit numbers: after the sign, the number of leading zeros z of the
other 7 bits is a power of ten, the first one ends it, and the 6 - z bits after it are a linear fraction f:

    10^-z * (0.1 + 0.9 (f + 1/2) / 2^(6 - z))        the middle of one of 2^(6-z) equal parts of [0.1, 1]

These are 127 magnitudes; with both signs, zero and 1 (which takes the place of "minus zero"), 256 numbers.

A block's scale is its largest element with its sign, so that this element becomes the 1 and is exact. An element is
coded as the nearest number of the map to x / scale, where

    |x / scale| = |x| * (1 / scale)   in float32;      border between neighbours: their mean, rounded to float32

and a magnitude on the border goes up. The code is the position in the sorted map.
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import (
    MIN_SCALE,
    ZERO_CODE,
    Answer,
    check_buckets,
    check_byte_codes,
    dynamic_borders,
    dynamic_map,
)

__all__ = ["block_scales", "blockwise_decode_add", "blockwise_encode"]


def block_scales(x: Tensor, block: int, scales: Tensor) -> Answer:
    """Write each block's largest element with its sign (in a tie, plus), zero below 2^-100; False if non-finite.

    >>> scales = torch.empty(2)
    >>> bool(block_scales(torch.tensor([3.0, -4.0, 1.0]), 2, scales)), scales.tolist()
    (True, [-4.0, 1.0])
    """
    check_buckets(x.numel(), block, scales)
    padded = torch.zeros(scales.numel() * block, dtype=torch.float32, device=x.device)
    padded[: x.numel()] = x
    table = padded.view(-1, block)
    high, low = table.amax(1), table.amin(1)
    found = torch.where(high >= -low, high, low)
    scales.copy_(torch.where(found.abs() < MIN_SCALE, 0.0, found))
    return found.isfinite().all()


def blockwise_encode(x: Tensor, scales: Tensor, block: int, out: Tensor) -> None:
    """Write each element's code to ``out``.

    >>> out = torch.empty(3, dtype=torch.uint8)
    >>> blockwise_encode(torch.tensor([3.0, -4.0, 0.0]), torch.tensor([-4.0]), 4, out), out.tolist()
    (None, [17, 255, 127])
    """
    check_byte_codes(x.numel(), out)
    check_buckets(x.numel(), block, scales)
    each = scales.repeat_interleave(block)[: x.numel()]
    inverse = torch.where(each != 0, 1.0 / each.abs(), 0.0)
    steps = torch.searchsorted(dynamic_borders().to(x.device), x.abs() * inverse, right=True)
    minus = x.signbit() != each.signbit()
    out.copy_(torch.where(minus, ZERO_CODE - steps.clamp(max=ZERO_CODE), ZERO_CODE + steps))


def blockwise_decode_add(data: Tensor, scales: Tensor, block: int, acc: Tensor, scale: float) -> None:
    """``acc += scale * (number * block's scale)``, the number and each product rounded to float32.

    >>> acc = torch.zeros(3)
    >>> blockwise_decode_add(torch.tensor([0, 255, 127], dtype=torch.uint8), torch.tensor([-4.0]), 4, acc, 0.5)
    >>> acc.tolist()
    [1.985937476158142, -2.0, 0.0]
    """
    check_byte_codes(acc.numel(), data)
    check_buckets(acc.numel(), block, scales)
    numbers = dynamic_map().to(torch.float32).to(acc.device)[data.to(torch.int64)]
    values = numbers * scales.repeat_interleave(block)[: acc.numel()]
    acc.add_(values * torch.tensor(scale, dtype=torch.float32))
