"""Stochastic rounding to few levels, with one scale for every ``bucket`` elements; in plain torch: the definition.

With L levels on each side of zero, a bucket's step is ``scale / L``, rounded to float32. An element becomes one of the
two whole numbers of steps around it, each with the chance that makes the mean right:

    y = clamp(x / step, -L, L)       level = floor(y) + 1 with probability y - floor(y), else floor(y)

The chance is drawn from ``uniform(key, i)``, a hash of the key and of the position in the vector: the same on every
machine and device, in any order. A bucket of scale zero has level zero throughout.

Packed, a level is the code ``level + L`` of N bits, where L = 2^(N-1) - 1; the last code stays unused.
"""

import torch
from torch import Tensor

from tersegrad.kernels.reference.bits import pack_bits, packed_nbytes, unpack_bits

SMALLEST = 2.0**-100  # a bucket of a smaller scale counts as zero: its step would have few bits
LARGEST = 2.0**128 - 2.0**122  # of a scale: so that rounding never leads to infinity
NORMS = ("max", "l2")

MIX_1 = 0x85EBCA6B  # odd multipliers with bits all over: those of MurmurHash3's last step (A. Appleby),
MIX_2 = 0xC2B2AE35
MIX_3 = 0x9E3779B1  # and 2^32 / golden ratio
UNIFORM_BITS = 24  # as many as a float32 holds


def bucket_count(n: int, bucket: int) -> int:
    """How many scales a vector of ``n`` elements has; the last bucket may be shorter.

    >>> bucket_count(1024, 512), bucket_count(1025, 512), bucket_count(0, 512)
    (2, 3, 0)
    """
    return -(-n // bucket)


def levels_of(bits: int) -> int:
    """Levels on each side of zero that a code of ``bits`` bits has room for.

    >>> levels_of(2), levels_of(4), levels_of(8)
    (1, 7, 127)
    """
    return (1 << bits - 1) - 1


def bucket_scales(x: Tensor, bucket: int, norm: str, scales: Tensor) -> bool:
    """Write each bucket's largest magnitude ("max") or Euclidean length ("l2"); False if an ``x`` is not finite.

    >>> scales = torch.empty(2)
    >>> bucket_scales(torch.tensor([3.0, -4.0, 1.0]), 2, "max", scales), scales.tolist()
    (True, [4.0, 1.0])
    >>> bucket_scales(torch.tensor([3.0, -4.0, 1.0]), 2, "l2", scales), scales.tolist()
    (True, [5.0, 1.0])
    """
    check_buckets(x.numel(), bucket, scales)
    check_norm(norm)
    padded = torch.zeros(scales.numel() * bucket, dtype=torch.float64, device=x.device)
    padded[: x.numel()] = x
    table = padded.view(-1, bucket)
    found = table.abs().amax(1) if norm == "max" else table.square().sum(1).sqrt()
    finite = bool(found.isfinite().all())
    scales.copy_(torch.where(found < SMALLEST, 0.0, found.clamp(max=LARGEST)))
    return finite


def uniform(key: int, n: int, device: torch.device) -> Tensor:
    """The hashed number of each position, 0 to 2^24 - 1.

    >>> uniform(1, 3, torch.device("cpu")).tolist()
    [10844287, 11043291, 13949022]
    """
    low, high = split_key(key)
    h = torch.arange(n, device=device) + low & 0xFFFFFFFF
    h = (h ^ (h >> 16)) * MIX_1 + high & 0xFFFFFFFF  # the key comes in twice: otherwise keys would only shift positions
    h = (h ^ (h >> 13)) * MIX_2 & 0xFFFFFFFF
    h = (h ^ (h >> 16)) * MIX_3 & 0xFFFFFFFF
    return (h ^ (h >> 15)) >> 32 - UNIFORM_BITS


def quantise(x: Tensor, scales: Tensor, bucket: int, levels: int, key: int, out: Tensor) -> None:
    """Write each element's level, -levels to levels, to ``out`` (int32).

    Levels of several vectors that share their scales may be added; a sum of levels times the step is the sum's value.

    >>> out = torch.empty(3, dtype=torch.int32)
    >>> quantise(torch.tensor([1.0, -0.5, 0.2]), torch.tensor([1.0]), 4, 2, 0, out), out.tolist()
    (None, [2, -1, 0])
    """
    check_buckets(x.numel(), bucket, scales)
    check_levels(levels)
    steps = torch.where(scales > 0, scales / levels, torch.inf).repeat_interleave(bucket)[: x.numel()]
    y = (x / steps).clamp(-levels, levels)
    below = y.floor()
    up = uniform(key, x.numel(), x.device) < (y - below) * 2.0**UNIFORM_BITS
    out.copy_(below.to(torch.int32) + up)


def qsgd_encode(x: Tensor, scales: Tensor, bucket: int, bits: int, key: int, out: Tensor) -> None:
    """``quantise`` to the levels of ``bits`` bits, packed into ``out``, which has exactly their bytes."""
    levels = levels_of(bits)
    codes = torch.empty(x.numel(), dtype=torch.int32, device=x.device)
    quantise(x, scales, bucket, levels, key, codes)
    pack_bits(codes + levels, bits, out)


def qsgd_decode_add(data: Tensor, scales: Tensor, bucket: int, bits: int, acc: Tensor, scale: float) -> None:
    """``acc += scale * (level * step)``, each product rounded to float32.

    The code that stands for nothing is read as the one before.
    """
    check_buckets(acc.numel(), bucket, scales)
    levels = levels_of(bits)
    codes = torch.empty(acc.numel(), dtype=torch.int32, device=acc.device)
    unpack_bits(data, bits, codes)
    steps = (scales / levels).repeat_interleave(bucket)[: acc.numel()]
    values = (codes.clamp(max=2 * levels) - levels) * steps
    acc.add_(values * torch.tensor(scale, dtype=torch.float32))


def split_key(key: int) -> tuple[int, int]:
    """Two halves of 32 bits, in which every bit depends on every bit of the key (as in SplitMix64, S. Vigna)."""
    if not 0 <= key < 1 << 64:
        raise ValueError(f"a key has 64 bits, and {key} has not. Ask mix_seed for one.")
    h = key + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    h ^= h >> 31
    return h & 0xFFFFFFFF, h >> 32


def check_buckets(n: int, bucket: int, scales: Tensor) -> None:
    """Raise ValueError unless there is one scale for each bucket."""
    if bucket < 1 or scales.numel() != bucket_count(n, bucket):
        raise ValueError(f"{n} elements in buckets of {bucket} do not have {scales.numel()} scales")


def check_levels(levels: int) -> None:
    """Raise ValueError unless a code of 16 bits or less has room for the levels."""
    if not 1 <= levels <= levels_of(16):
        raise ValueError(f"1 to {levels_of(16)} levels, not {levels}")


def check_norm(norm: str) -> None:
    """Raise ValueError unless the norm is known."""
    if norm not in NORMS:
        raise ValueError(f"the norms are {NORMS}, not {norm!r}")


def check_codes(n: int, bits: int, data: Tensor) -> None:
    """Raise ValueError unless ``data`` has exactly the bytes of the codes, and codes have room for a level."""
    check_levels(levels_of(bits) if bits > 0 else 0)
    if data.numel() != packed_nbytes(n, bits):
        raise ValueError(f"{n} codes of {bits} bits take {packed_nbytes(n, bits)} bytes, not {data.numel()}")
