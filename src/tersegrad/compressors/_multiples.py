"""Every value as a signed multiple of a threshold, in one bit if it is the threshold itself: VGC's hybrid.

Meta: how many values are more than once the threshold (4 bytes), bits of their multiples (1). Body: the signs; if any
is more than once the threshold, a bit for each value that says so; then those multiples, less 2. Each part is padded
to whole words.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._signs import require_threshold
from tersegrad.core import Paused, Pausing, Payload, State, padded, param
from tersegrad.kernels.ops import packed_nbytes

MOST = 256  # times the threshold: the most that one value can be
_META = struct.Struct("<IB3x")


@dataclass(frozen=True, repr=False)
class Multiples(Pausing):
    """decode = +-k tau, where k = floor(|x| / tau), from 1 to 256. Zero becomes +tau."""

    tau: float = param(doc="what every value becomes a multiple of")

    def __post_init__(self) -> None:
        require_threshold(self, self.tau)

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        times = multiples(x.abs(), self.tau)
        more = times > 1
        finite, count, top = yield kernels.on(x).all_finite(x), more.sum(), times.max() if x.numel() else 1
        if not finite:
            return Payload.nonfinite(x.numel(), state, x.device)
        width = int(top - 2).bit_length() if count else 0
        parts = [(x.lt(0).to(torch.uint8), 1)]
        if count:
            parts += [(more.to(torch.uint8), 1), ((times[more] - 2).to(torch.uint8), width)]
        lengths = _lengths(x.numel(), int(count), width)
        payload = Payload.empty(sum(lengths), x.numel(), state, x.device, _META.pack(int(count), width))
        for (codes, bits), body in zip(parts, payload.body.split(lengths), strict=False):
            _pack(codes, bits, body)
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        count, width = _read_meta(payload, acc.numel())
        signs, more, rest = payload.body.split(_lengths(acc.numel(), count, width))
        values = _unpack(signs, 1, acc.numel()).to(torch.float32).mul_(-2.0).add_(1.0)
        if count:
            at = _unpack(more, 1, acc.numel()).nonzero().flatten()
            if at.numel() != count:
                raise ValueError(f"{at.numel()} values are marked as multiples, and {count} multiples follow.")
            values[at] *= _unpack(rest, width, count).to(torch.float32) + 2.0
        acc.add_(values.mul_(self.tau), alpha=scale)


def multiples(magnitudes: Tensor, tau: float) -> Tensor:
    """floor(magnitude / tau), from 1 to ``MOST``.

    >>> multiples(torch.tensor([0.5, 1.5, 2.0, 1e9]), 1.0).tolist()
    [1.0, 1.0, 2.0, 256.0]
    """
    return magnitudes.div(tau).floor_().clamp_(1.0, MOST)


def _lengths(numel: int, count: int, width: int) -> list[int]:
    """Bytes of the three parts."""
    signs = padded(packed_nbytes(numel, 1))
    return [signs, signs if count else 0, padded(packed_nbytes(count, width)) if width else 0]


def _pack(codes: Tensor, bits: int, body: Tensor) -> None:
    if bits:
        nbytes = packed_nbytes(codes.numel(), bits)
        kernels.on(codes).pack_bits(codes, bits, body[:nbytes])
        body[nbytes:].zero_()


def _unpack(body: Tensor, bits: int, numel: int) -> Tensor:
    codes = torch.zeros(numel, dtype=torch.uint8, device=body.device)
    if bits:
        kernels.on(body).unpack_bits(body[: packed_nbytes(numel, bits)], bits, codes)
    return codes


def _read_meta(payload: Payload, numel: int) -> tuple[int, int]:
    """How many multiples follow, and their bits; ValueError if the payload does not hold them."""
    if len(payload.meta) != _META.size:
        raise ValueError(f"multiples have {_META.size} bytes of meta, got {len(payload.meta)}.")
    count, width = _META.unpack(payload.meta)
    if count > numel or width > 8 or payload.body.numel() != sum(_lengths(numel, count, width)):
        raise ValueError(
            f"{payload.body.numel()} bytes do not hold {numel} signs and {count} multiples of {width} bits each."
        )
    return count, width
