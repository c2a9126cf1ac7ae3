"""Elements as -s, 0 or s, drawn without bias, five to a byte; in plain torch: the definition.

With a scale s for every ``bucket`` elements,

    digit = 1 + sign(x) with probability |x| / s, else 1          (certainly if |x| >= s)

An element is drawn if ``uniform(key, i) < |x| * (2^24 / s)``, product and quotient rounded to float32 (``qsgd``).

Packed, five digits are one byte d0 + 3 d1 + 9 d2 + 27 d3 + 81 d4, at most 242. So that neighbours in memory are
neighbours in a vector register, the five are not side by side: in a block of 1280 elements, the digits of byte j are
those of the elements j, j + 256, ..., j + 1024. The last block has B = ceil(rest / 5) bytes, and a stride of B;
digits after the last element are 0. So n elements take ceil(n / 5) bytes.
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import (
    MIN_SCALE,
    TERNARY_MAX_BYTE,
    UNIFORM_BITS,
    Answer,
    check_buckets,
    check_ternary,
    ternary_refusal,
)
from tersegrad.kernels.ops import TERNARY_BYTES as BYTES
from tersegrad.kernels.ops import TERNARY_DIGITS as DIGITS
from tersegrad.kernels.ops import ternary_nbytes as ternary_nbytes
from tersegrad.kernels.reference.sampling import uniform

__all__ = ["ternary_decode_add", "ternary_encode", "ternary_scales"]


def ternary_scales(x: Tensor, bucket: int, clip: float, scales: Tensor) -> Answer:
    """Write each group's largest magnitude, but at most ``clip`` times its root mean square; False if non-finite.

    A scale below 2^-100 counts as zero. A ``clip`` of infinity disables clipping.

    >>> scales = torch.empty(2)
    >>> bool(ternary_scales(torch.tensor([3.0, -4.0, 0.5]), 2, float("inf"), scales)), scales.tolist()
    (True, [4.0, 0.5])
    """
    check_buckets(x.numel(), bucket, scales)
    padded = torch.zeros(scales.numel() * bucket, dtype=torch.float64, device=x.device)
    padded[: x.numel()] = x
    table = padded.view(-1, bucket)
    found = table.abs().amax(1)
    finite = found.isfinite().all()
    if clip < torch.inf:
        counts = torch.full_like(found, bucket)
        if found.numel():
            counts[-1] = x.numel() - (found.numel() - 1) * bucket
        found = torch.minimum(found, clip * (table.square().sum(1) / counts).sqrt())
    scales.copy_(torch.where(found < MIN_SCALE, 0.0, found))
    return finite


def ternary_encode(x: Tensor, scales: Tensor, bucket: int, key: int, out: Tensor) -> None:
    """Write the packed digits to ``out``, which has exactly that many bytes.

    >>> out = torch.empty(1, dtype=torch.uint8)
    >>> ternary_encode(torch.tensor([-2.0, 0.0, 2.0]), torch.tensor([2.0]), 4, 0, out), out.tolist()  # 0 + 3 + 18
    (None, [21])
    """
    check_buckets(x.numel(), bucket, scales)
    check_ternary(x.numel(), out)
    factors = torch.where(scales > 0, 2.0**UNIFORM_BITS / scales, 0.0).repeat_interleave(bucket)[: x.numel()]
    hit = uniform(key, x.numel(), x.device) < x.abs() * factors
    digits = 1 + hit * torch.where(x.signbit(), -1, 1)
    whole = x.numel() // (DIGITS * BYTES)
    out[: whole * BYTES] = _packed(digits[: whole * DIGITS * BYTES].view(whole, DIGITS, BYTES))
    rest, place = digits[whole * DIGITS * BYTES :], out[whole * BYTES :]
    place.copy_(_packed(torch.nn.functional.pad(rest, (0, -rest.numel() % DIGITS)).view(1, DIGITS, -1)))


def ternary_decode_add(data: Tensor, scales: Tensor, bucket: int, acc: Tensor, scale: float) -> None:
    """``acc += (digit - 1) * (scale * s)``, the product rounded to float32; ValueError if a byte is above 242.

    >>> acc = torch.zeros(3)
    >>> ternary_decode_add(torch.tensor([21], dtype=torch.uint8), torch.tensor([2.0]), 4, acc, 1.0), acc.tolist()
    (None, [-2.0, 0.0, 2.0])
    """
    check_buckets(acc.numel(), bucket, scales)
    check_ternary(acc.numel(), data)
    if data.numel() and (largest := int(data.max())) > TERNARY_MAX_BYTE:
        raise ternary_refusal(largest)
    whole = data.numel() // BYTES
    blocks, rest = data[: whole * BYTES].view(whole, BYTES), data[whole * BYTES :].view(1, -1)
    digits = torch.cat([_unpacked(blocks), _unpacked(rest)])[: acc.numel()]
    step = (scales * torch.tensor(scale, dtype=torch.float32)).repeat_interleave(bucket)[: acc.numel()]
    acc.add_((digits - 1) * step)


def _packed(digits: Tensor) -> Tensor:
    """The bytes of blocks of digits, of shape (blocks, 5, bytes per block), concatenated."""
    weights = 3 ** torch.arange(DIGITS, device=digits.device)
    return (digits * weights.unsqueeze(1)).sum(1).flatten()


def _unpacked(blocks: Tensor) -> Tensor:
    """The digits of blocks of bytes, concatenated."""
    weights = 3 ** torch.arange(DIGITS, device=blocks.device)
    return (blocks.to(torch.int64).unsqueeze(1) // weights.unsqueeze(1) % 3).flatten()
