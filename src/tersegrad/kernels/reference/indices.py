"""Sorted indices as bits, in plain Python: the definition the fast kernels must agree with, bit for bit.

Bits fill a byte from its lowest upwards, numbers are written lowest bit first, and the last byte is padded with zeros.

**The gap code** writes ``gap = index - previous - 1``, where the first ``previous`` is -1. If indices are uniform, gaps
are geometrically distributed, and Golomb-Rice is nearly optimal: steps of 2**b, counted in unary. But the large
elements of real gradients are neighbours, and the few gaps between their clusters are huge: there the steps should
double, which saves a quarter to almost half of the bits that Golomb-Rice with an escape takes (top 1 % of ResNet-20
gradients). One code does both, by an exponent ``b`` and a ``knee``, beyond which steps double:

    s = min(gap >> b, knee)                  whole steps of 2**b, at most knee of them
    v = gap - s * 2**b + 2**b                the remainder, with a bit on top
    w = floor(log2(v))
    code = s + w - b zeros, a one, and the w bits of v below its highest

``knee = 0`` is the exponential Golomb code, a large knee is Golomb-Rice. A header of 6 bits before every
``BLOCK`` gaps has ``b`` (5 bits) and which of the two ``KNEES``. No code has more than 37 zeros, a one and
31 bits: a single huge gap costs little, and reading corrupt data takes a bounded time.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from tersegrad.kernels.ops import (
    BLOCK,
    COUNT,
    CUT,
    EXPONENT,
    FINE,
    GAP,
    HEADER_BITS,
    KNEES,
    MAX_EXPONENT,
    MAX_PREFIX,
    MAX_WIDTH,
    OUTSIDE,
    PADDING,
    TRAILING,
)

__all__ = ["bitmap_decode", "bitmap_encode", "gap_decode", "gap_encode", "gap_plan"]


def gap_plan(indices: Tensor, universe: int, headers: Tensor) -> int:
    """Choose the header of each block into ``headers`` (uint8); return the bits ``gap_encode`` will write.

    For each knee the exponent starts near floor(log2(mean gap)) and moves by one as long as that saves
    bits. Returns -1 unless the indices increase strictly and lie in [0, universe).

    >>> headers = torch.empty(1, dtype=torch.uint8)
    >>> gap_plan(torch.tensor([3, 500, 501], dtype=torch.int32), 1000, headers), headers.tolist()
    (27, [2])
    """
    gaps = _gaps(indices)
    if any(gap < 0 for gap in gaps) or sum(gaps) + len(gaps) > universe:
        return -1
    total, chosen = 0, []
    for block in range(headers.numel()):
        part = gaps[block * BLOCK : (block + 1) * BLOCK]
        exponent = max((sum(part) // len(part)).bit_length() - 1, 0)
        straight, bits = _best_exponent(part, exponent, KNEES[1])
        doubling, fewer = _best_exponent(part, straight, KNEES[0])
        chosen.append(doubling if fewer < bits else straight | 1 << 5)
        total += HEADER_BITS + min(bits, fewer)
    headers.copy_(torch.tensor(chosen, dtype=torch.uint8))
    return total


def gap_encode(indices: Tensor, headers: Tensor, out: Tensor) -> None:
    """Write the gap code of ``indices`` with the planned headers; ``out`` has exactly the planned bytes."""
    gaps = _gaps(indices)
    bits: list[int] = []
    for block, header in enumerate(headers.tolist()):
        bits += _binary(header, HEADER_BITS)
        for gap in gaps[block * BLOCK : (block + 1) * BLOCK]:
            zeros, width, v = _split(gap, *_parameters(header))
            bits += [0] * zeros + [1] + _binary(v, width)
    _pack(bits, out)


def gap_decode(data: Tensor, universe: int, out: Tensor) -> tuple[int, int]:
    """Read ``len(out)`` indices; return the result code (``FINE``, ``CUT`` ...) and its place (see ``ops.indices``).

    Unless it is ``FINE``, ``out`` is unspecified.
    """
    bits = _Reader(data)
    index = -1
    for start in range(0, out.numel(), BLOCK):
        header = bits.take(HEADER_BITS)
        if bits.position > bits.end:
            return CUT, start
        exponent, knee = _parameters(header)
        if exponent > MAX_EXPONENT:
            return EXPONENT, exponent
        block = []
        for i in range(start, min(start + BLOCK, out.numel())):
            zeros = bits.zeros()
            width = exponent + max(zeros - knee, 0)
            if width > MAX_WIDTH:
                return (CUT if bits.position + MAX_PREFIX > bits.end else GAP), i
            bits.position += zeros + 1
            index += bits.take(width) + 2**width + (min(zeros, knee) - 1) * 2**exponent + 1
            block.append(index)
        if bits.position > bits.end:
            return CUT, start
        if index >= universe:
            return OUTSIDE, start
        out[start : start + len(block)] = torch.tensor(block, dtype=torch.int32)
    return _check_end(data, bits.position)


def bitmap_encode(indices: Tensor, out: Tensor) -> None:
    """Set bit i of ``out`` if i is among ``indices``, and clear it otherwise."""
    bits = [0] * (8 * out.numel())
    for index in indices.tolist():
        bits[index] = 1
    _pack(bits, out)


def bitmap_decode(data: Tensor, universe: int, out: Tensor) -> tuple[int, int]:
    """Read the positions of the ``len(out)`` set bits in ``data``, which has ceil(universe / 8) bytes.

    Returns the result code and its place, as ``gap_decode`` does.
    """
    found, where = _check_end(data, universe)
    if found != FINE:
        return found, where
    indices = [i for i, bit in enumerate(_bits(data)) if bit]
    if len(indices) != out.numel():
        return COUNT, len(indices)
    out.copy_(torch.tensor(indices, dtype=torch.int32))
    return FINE, 0


def _gaps(indices: Tensor) -> list[int]:
    numbers = indices.tolist()
    return [index - previous - 1 for previous, index in zip([-1, *numbers], numbers, strict=False)]


def _split(gap: int, exponent: int, knee: int) -> tuple[int, int, int]:
    """Leading zeros, width and v of a gap's code."""
    steps = min(gap >> exponent, knee)
    v = gap - (steps << exponent) + (1 << exponent)
    width = v.bit_length() - 1
    return steps + width - exponent, width, v


def _parameters(header: int) -> tuple[int, int]:
    return header & 31, KNEES[header >> 5]


def _best_exponent(gaps: list[int], exponent: int, knee: int) -> tuple[int, int]:
    """Descend from ``exponent`` to the one where no neighbour takes fewer bits; return it and its bits."""

    def bits(exponent: int) -> int:
        splits = (_split(gap, exponent, knee) for gap in gaps)
        return sum(zeros + 1 + width for zeros, width, _ in splits)

    best = bits(exponent)
    for step in (-1, 1):
        start = exponent
        while 0 <= exponent + step <= MAX_EXPONENT and (candidate := bits(exponent + step)) < best:
            exponent, best = exponent + step, candidate
        if exponent != start:
            break  # it fell on this side, so it rises on the other
    return exponent, best


def _binary(number: int, width: int) -> list[int]:
    return [number >> i & 1 for i in range(width)]


def _bits(data: Tensor) -> Iterator[int]:
    return (byte >> i & 1 for byte in data.tolist() for i in range(8))


def _pack(bits: Iterable[int], out: Tensor) -> None:
    data = bytearray(out.numel())
    for i, bit in enumerate(bits):
        data[i >> 3] |= bit << (i & 7)
    out.copy_(torch.tensor(list(data), dtype=torch.uint8))


def _check_end(data: Tensor, used: int) -> tuple[int, int]:
    """Check that ``data`` has ``used`` bits, and zeros that fill the last byte."""
    if data.numel() > -(-used // 8):
        return TRAILING, -(-used // 8)
    if used % 8 and int(data[-1]) >> used % 8:
        return PADDING, used
    return FINE, 0


class _Reader:
    """A reader of a bit string, which continues with zeros after its end."""

    def __init__(self, data: Tensor) -> None:
        self.bits = list(_bits(data))
        self.end = len(self.bits)
        self.position = 0

    def zeros(self) -> int:
        """Count the zeros before the next one, at most MAX_PREFIX, without moving on."""
        prefix = self.bits[self.position : self.position + MAX_PREFIX]
        return prefix.index(1) if 1 in prefix else MAX_PREFIX

    def take(self, width: int) -> int:
        """The next ``width`` bits as a number."""
        taken = self.bits[self.position : self.position + width]
        self.position += width
        return sum(bit << i for i, bit in enumerate(taken))
