"""Stochastic rounding to few levels, with one scale for every ``bucket`` elements; in plain torch: the definition.

With L levels on each side of zero, a bucket's step is ``scale / L``, rounded to float32. An element becomes one of the
two nearest multiples of the step, each with the probability that makes the result unbiased:

    y = clamp(x / step, -L, L)       level = floor(y) + 1 with probability y - floor(y), else floor(y)

The random number is ``uniform(key, i)``, a hash of the key and of the position in the vector: the same on every
machine and device, in any order. A bucket of scale zero has level zero throughout.

Packed, a level is the code ``level + L`` of N bits, where L = 2^(N-1) - 1; the last code stays unused.
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import (
    MIN_SCALE,
    QSGD_MAX_SCALE,
    UNIFORM_BITS,
    Answer,
    check_buckets,
    check_level_codes,
    check_norm,
    check_quantise,
    levels_of,
)
from tersegrad.kernels.ops import NORMS as NORMS
from tersegrad.kernels.ops import bucket_count as bucket_count
from tersegrad.kernels.reference.bits import pack_bits, unpack_bits
from tersegrad.kernels.reference.sampling import uniform

__all__ = ["bucket_scales", "qsgd_decode_add", "qsgd_encode", "quantise"]

LARGEST = QSGD_MAX_SCALE


def bucket_scales(x: Tensor, bucket: int, norm: str, scales: Tensor) -> Answer:
    """Write each bucket's largest magnitude ("max") or Euclidean norm ("l2"); False if an ``x`` is non-finite.

    >>> scales = torch.empty(2)
    >>> bool(bucket_scales(torch.tensor([3.0, -4.0, 1.0]), 2, "max", scales)), scales.tolist()
    (True, [4.0, 1.0])
    >>> bool(bucket_scales(torch.tensor([3.0, -4.0, 1.0]), 2, "l2", scales)), scales.tolist()
    (True, [5.0, 1.0])
    """
    check_buckets(x.numel(), bucket, scales)
    check_norm(norm)
    padded = torch.zeros(scales.numel() * bucket, dtype=torch.float64, device=x.device)
    padded[: x.numel()] = x
    table = padded.view(-1, bucket)
    found = table.abs().amax(1) if norm == "max" else table.square().sum(1).sqrt()
    scales.copy_(torch.where(found < MIN_SCALE, 0.0, found.clamp(max=QSGD_MAX_SCALE)))
    return found.isfinite().all()


def quantise(x: Tensor, scales: Tensor, bucket: int, levels: int, key: int, out: Tensor) -> None:
    """Write each element's level, -levels to levels, to ``out`` (int32).

    Levels of several vectors that share their scales may be added; a sum of levels times the step is the sum's value.

    >>> out = torch.empty(3, dtype=torch.int32)
    >>> quantise(torch.tensor([1.0, -0.5, 0.2]), torch.tensor([1.0]), 4, 2, 0, out), out.tolist()
    (None, [2, -1, 0])
    """
    check_quantise(x, scales, bucket, levels, out)
    steps = torch.where(scales > 0, scales / levels, torch.inf).repeat_interleave(bucket)[: x.numel()]
    y = (x / steps).clamp(-levels, levels)
    below = y.floor()
    up = uniform(key, x.numel(), x.device) < (y - below) * 2.0**UNIFORM_BITS
    out.copy_(below.to(torch.int32) + up)


def qsgd_encode(x: Tensor, scales: Tensor, bucket: int, bits: int, key: int, out: Tensor) -> None:
    """``quantise`` to the levels of ``bits`` bits, packed into ``out``, which has exactly that many bytes."""
    check_level_codes(x.numel(), bits, out)
    levels = levels_of(bits)
    codes = torch.empty(x.numel(), dtype=torch.int32, device=x.device)
    quantise(x, scales, bucket, levels, key, codes)
    pack_bits(codes + levels, bits, out)


def qsgd_decode_add(data: Tensor, scales: Tensor, bucket: int, bits: int, acc: Tensor, scale: float) -> None:
    """``acc += scale * (level * step)``, each product rounded to float32.

    The unused code is read as the one before it.
    """
    check_buckets(acc.numel(), bucket, scales)
    check_level_codes(acc.numel(), bits, data)
    levels = levels_of(bits)
    codes = torch.empty(acc.numel(), dtype=torch.int32, device=acc.device)
    unpack_bits(data, bits, codes)
    steps = (scales / levels).repeat_interleave(bucket)[: acc.numel()]
    values = (codes.clamp(max=2 * levels) - levels) * steps
    acc.add_(values * torch.tensor(scale, dtype=torch.float32))
