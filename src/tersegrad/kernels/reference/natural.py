"""Magnitudes rounded at random to one of the two nearest powers of two; in plain torch: the definition.

The pattern of a float32 magnitude is an exponent field of 8 bits and a mantissa of 23. Adding a random number of 23
bits and dropping the mantissa raises the exponent with probability mantissa / 2^23, so the result is unbiased:

    |x| = 2^e (1 + m)  ->  2^(e + 1) with probability m, else 2^e

From 2^127 on there is no larger power that is finite: everything there becomes 2^127. Everything below 2^-126, the
denormals, becomes zero. So nothing finite becomes infinite, and no element is off by more than |x|.

Packed: n bytes of exponent fields, 0 to 254, then the signs (``signs``): 9 bits per element.
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import ABS_MASK, INF_BITS, MANTISSA_BITS, NORMAL_BITS, TOP_EXPONENT, Answer, check_natural
from tersegrad.kernels.ops import natural_nbytes as natural_nbytes
from tersegrad.kernels.reference.bits import pack_bits, unpack_bits
from tersegrad.kernels.reference.sampling import uniform

__all__ = ["natural_decode_add", "natural_encode"]


def natural_encode(x: Tensor, key: int, out: Tensor) -> Answer:
    """Write exponents and signs to ``out``, which has exactly that many bytes; False if an ``x`` is non-finite.

    >>> out = torch.empty(4, dtype=torch.uint8)
    >>> bool(natural_encode(torch.tensor([1.0, -0.5, 0.0]), 0, out)), out.tolist()
    (True, [127, 126, 0, 2])
    """
    check_natural(x.numel(), out)
    magnitude = x.view(torch.int32) & ABS_MASK
    raised = magnitude.to(torch.int64) + (uniform(key, x.numel(), x.device) >> 1)
    out[: x.numel()] = torch.where(magnitude < NORMAL_BITS, 0, (raised >> MANTISSA_BITS).clamp(max=TOP_EXPONENT))
    pack_bits(x.signbit().to(torch.uint8), 1, out[x.numel() :])
    return (magnitude < INF_BITS).all()


def natural_decode_add(data: Tensor, acc: Tensor, scale: float) -> None:
    """``acc += scale * value``, the product rounded to float32; an exponent above 254 is read as 254.

    >>> acc = torch.zeros(3)
    >>> natural_decode_add(torch.tensor([127, 126, 0, 2], dtype=torch.uint8), acc, 2.0), acc.tolist()
    (None, [2.0, -1.0, 0.0])
    """
    check_natural(acc.numel(), data)
    minus = torch.empty(acc.numel(), dtype=torch.uint8, device=acc.device)
    unpack_bits(data[acc.numel() :], 1, minus)
    values = (data[: acc.numel()].to(torch.int32).clamp(max=TOP_EXPONENT) << MANTISSA_BITS).view(torch.float32)
    acc.add_(torch.where(minus.bool(), -values, values) * torch.tensor(scale, dtype=torch.float32))
