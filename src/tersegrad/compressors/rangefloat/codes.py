"""The range-based float of N bits: which numbers its codes stand for, and which layout suits a vector.

Wang et al., "FFT-based gradient sparsification for the distributed training of deep neural networks", HPDC 2020.
``kernels.reference.range_float`` defines codes and rounding.

A layout is given by the bits N of a code, the bits m of a mantissa and a range. The numbers at the ends of the range,
truncated to m mantissa bits, are steps t_high and t_low of the float32 pattern. From eps = base << (23 - m) on, the
counts of codes are

    positives = t_high - base + 1,   negatives = t_low - base + 1,   positives + negatives <= 2^N - 1

``fit`` takes the smallest base, that is the smallest eps, that satisfies this. For a symmetric range both are
2^(N-1) - 1 and the last code stays unused.
"""

import struct

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Paused
from tersegrad.kernels.ops import INF_BITS, Layout, bits_of, packed_nbytes

__all__ = ["HEADER", "Layout", "best_mantissa", "decode_add", "encode", "fit", "layout_meta", "read_layout", "with_eps"]

HEADER = struct.Struct("<IHHB")  # base, positives, negatives, mantissa: all that decoding needs
SAMPLE = 1 << 14  # elements that are enough to compare mantissas on
LARGEST = 1 << 10  # how many of them are the largest of the vector


def fit(bits: int, mantissa: int, low: float, high: float, nearest: bool = False) -> Layout:
    """The layout with the smallest eps that reaches from ``low`` to ``high``; its ends are truncated (or rounded).

    Float32 has no magnitude below 1e-45: if a range would go lower, codes stay unused.

    >>> fit(8, 3, -1.0, 1.0)
    Layout(bits=8, mantissa=3, base=890, positives=127, negatives=127)
    >>> fit(8, 3, -1.0, 1.0).eps
    1.9073486328125e-05
    >>> fit(8, 3, 0.0, 1.0).positives, fit(8, 3, -0.25, 1.0)[3:]
    (255, (135, 119))
    """
    tops = [_top(abs(end), mantissa, nearest) for end in (low, high) if end]
    if not tops:
        return Layout(bits, mantissa, 1, 0, 0).check()
    capacity, largest, smallest = (1 << bits) - 1, max(tops), min(tops)
    base = largest - capacity + 1
    if len(tops) == 2 and base <= smallest:
        base = -(-(largest + smallest + 2 - capacity) // 2)
    return _counted(bits, mantissa, max(base, 1), low, high, nearest)


def with_eps(bits: int, mantissa: int, low: float, high: float, eps: float, nearest: bool = False) -> Layout:
    """The layout with a given eps (truncated to the mantissa); ValueError if there are too few codes for it.

    >>> with_eps(8, 3, -2.0, 2.0, 0.125)
    Layout(bits=8, mantissa=3, base=992, positives=33, negatives=33)
    """
    return _counted(bits, mantissa, _top(eps, mantissa, False), low, high, nearest)


def _counted(bits: int, mantissa: int, base: int, low: float, high: float, nearest: bool) -> Layout:
    negatives, positives = (max(0, _top(abs(end), mantissa, nearest) - base + 1) if end else 0 for end in (low, high))
    return Layout(bits, mantissa, base, positives, negatives).check()


def _top(magnitude: float, mantissa: int, nearest: bool) -> int:
    """Steps of the float32 pattern between zero and a magnitude, at most those to the largest finite number."""
    shift = 23 - mantissa
    return min(bits_of(magnitude) + (1 << shift - 1 if nearest else 0), INF_BITS - 1) >> shift


def encode(x: Tensor, layout: Layout, nearest: bool, out: Tensor) -> kernels.Answer:
    """Write the codes to ``out``, which has ``packed_nbytes`` bytes; returns whether all elements are finite."""
    finite: kernels.Answer = kernels.on(x).range_encode(x, layout, nearest, out)
    return finite


def decode_add(layout: Layout, data: Tensor, acc: Tensor, scale: float) -> None:
    """``acc += scale * decoded(data)``; ValueError, before anything is added, if the data is malformed."""
    nbytes = packed_nbytes(acc.numel(), layout.bits)
    if data.numel() != nbytes:
        raise ValueError(f"{acc.numel()} range floats of {layout.bits} bits take {nbytes} bytes, got {data.numel()}.")
    kernels.on(acc).range_decode_add(data, layout, acc, scale)


def layout_meta(layout: Layout) -> bytes:
    """The layout as host bytes."""
    return HEADER.pack(layout.base, layout.positives, layout.negatives, layout.mantissa)


def read_layout(meta: bytes, bits: int) -> Layout:
    """The layout that ``layout_meta`` wrote; ValueError if it is malformed."""
    if len(meta) != HEADER.size:
        raise ValueError(f"the layout of range floats takes {HEADER.size} bytes, got {len(meta)}.")
    base, positives, negatives, mantissa = HEADER.unpack(meta)
    return Layout(bits, mantissa, base, positives, negatives).check()


def best_mantissa(x: Tensor, bits: int, low: float, high: float, nearest: bool) -> Paused[int]:
    """The mantissa with the smallest squared error on (a sample of) ``x``; of equally good ones the shortest.

    More mantissa bits are finer steps over fewer powers of two: large elements gain precision, small ones become zero.
    """
    end = max(-low, high)
    sample, weights = _sample(x)
    data = torch.empty(packed_nbytes(sample.numel(), bits), dtype=torch.uint8, device=x.device)

    def error(mantissa: int) -> Tensor:
        layout = fit(bits, mantissa, low, high, nearest)
        encode(sample, layout, nearest, data)
        rest = sample.clone()
        decode_add(layout, data, rest, -1.0)
        return rest.div_(end).square_().dot(weights)  # in units of the range: no square overflows float32

    errors = yield tuple(map(error, range(bits)))
    return min(range(bits), key=errors.__getitem__)


def _sample(x: Tensor) -> tuple[Tensor, Tensor]:
    """Some elements, and how many elements of the vector each stands for.

    The largest are all included, as a few of them may have most of the energy; the others are drawn at random from the
    whole vector, as a fixed stride would resonate with rows and channels.
    """
    n, kernel = x.numel(), kernels.on(x)
    if n <= SAMPLE:
        return x, torch.ones_like(x)
    indices = torch.empty(LARGEST, dtype=torch.int32, device=x.device)
    kernel.top_k(x, LARGEST, indices, indices.new_empty(kernel.top_k_capacity(n, LARGEST)))
    largest = x[indices]
    golden = torch.arange(SAMPLE - LARGEST, device=x.device) * 2654435769 & 0xFFFFFFFF
    others = x[golden * n >> 32]
    others = others[others.abs() < largest.abs().min()]
    weights = torch.ones(LARGEST + others.numel(), device=x.device)
    weights[LARGEST:] = (n - LARGEST) / max(1, others.numel())
    return torch.cat([largest, others]), weights
