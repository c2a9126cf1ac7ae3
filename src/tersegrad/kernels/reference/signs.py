"""One sign bit per element, and one or two means per group of ``bucket`` elements; in plain torch: the definition.

The sign of an element is the sign bit of its float: that of +0 is plus, that of -0 minus. Signs are packed as codes of
one bit (``bits``): bit i % 8 of byte i // 8 is set if element i is negative. Padding bits are zero.
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import LANES as LANES
from tersegrad.kernels.ops import Answer, bucket_count, check_sign_groups, check_signs
from tersegrad.kernels.reference.bits import pack_bits, unpack_bits
from tersegrad.kernels.reference.sampling import uniform

__all__ = ["break_ties", "one_bit_encode", "scaled_sign_encode", "signs_decode_add"]


def scaled_sign_encode(x: Tensor, bucket: int, means: Tensor, out: Tensor) -> Answer:
    """Write each group's mean of ``|x|``, and all signs to ``out``; False if an ``x`` is non-finite.

    >>> means, out = torch.empty(1), torch.empty(1, dtype=torch.uint8)
    >>> bool(scaled_sign_encode(torch.tensor([1.0, -2.0, 0.0, -5.0]), 32, means, out)), means.tolist(), out.tolist()
    (True, [2.0], [10])
    """
    check_sign_groups(x.numel(), bucket, means.numel())
    _pack(x, out)
    sums, counts = _sums(x.double().abs(), bucket), _sums(torch.ones_like(x), bucket)
    means.copy_(sums / counts)
    return sums.isfinite().all()


def one_bit_encode(x: Tensor, bucket: int, means: Tensor, out: Tensor) -> Answer:
    """Write each group's mean of the elements with sign plus and of those with sign minus, and all signs to ``out``.

    ``means`` has two numbers per group; the mean of no elements is zero. False if an ``x`` is non-finite.

    >>> means, out = torch.empty(2), torch.empty(1, dtype=torch.uint8)
    >>> bool(one_bit_encode(torch.tensor([-1.0, -1.0, 2.0, 2.0]), 32, means, out)), means.tolist(), out.tolist()
    (True, [2.0, -1.0], [3])
    """
    check_sign_groups(x.numel(), bucket, means.numel() / 2)
    _pack(x, out)
    minus = x.signbit()
    finite = []
    for which, side in enumerate((~minus, minus)):
        sums, counts = _sums(torch.where(side, x.double(), 0.0), bucket), _sums(side.double(), bucket)
        means.view(-1, 2)[:, which] = torch.where(counts > 0, sums / counts, 0.0)
        finite.append(sums.isfinite().all())
    return finite[0] & finite[1]


def signs_decode_add(data: Tensor, values: Tensor, bucket: int, acc: Tensor, scale: float) -> None:
    """``acc += scale * value``, the product rounded to float32.

    ``values`` has two numbers per group: the value of a plus and of a minus.

    >>> acc = torch.ones(4)
    >>> signs_decode_add(torch.tensor([3], dtype=torch.uint8), torch.tensor([2.0, -1.0]), 32, acc, 0.5), acc.tolist()
    (None, [0.5, 0.5, 2.0, 2.0])
    """
    check_sign_groups(acc.numel(), bucket, values.numel() / 2)
    check_signs(acc.numel(), data)
    minus = torch.empty(acc.numel(), dtype=torch.uint8, device=acc.device)
    unpack_bits(data, 1, minus)
    scaled = (values * torch.tensor(scale, dtype=torch.float32)).view(-1, 2).repeat_interleave(bucket, 0)
    acc.add_(torch.where(minus.bool(), scaled[: acc.numel(), 1], scaled[: acc.numel(), 0]))


def break_ties(votes: Tensor, key: int) -> None:
    """Turn every zero into +1 or -1, by the highest bit of the hash of the key and the position.

    >>> votes = torch.tensor([0.0, 3.0, 0.0, -2.0, 0.0])
    >>> break_ties(votes, 6), votes.tolist()
    (None, [1.0, 3.0, 1.0, -2.0, -1.0])
    """
    high = uniform(key, votes.numel(), votes.device) >= 1 << 23
    votes.copy_(torch.where(votes == 0, torch.where(high, 1.0, -1.0), votes))


def _pack(x: Tensor, out: Tensor) -> None:
    check_signs(x.numel(), out)
    pack_bits(x.signbit().to(torch.uint8), 1, out)


def _sums(x: Tensor, bucket: int) -> Tensor:
    """Sums of each group, in float64."""
    padded = torch.zeros(bucket_count(x.numel(), bucket) * bucket, dtype=torch.float64, device=x.device)
    padded[: x.numel()] = x
    return padded.view(-1, bucket).sum(1)
