"""The Fourier transform of a real vector in pieces of a fast length: n numbers become n numbers, two per bin.

Every piece has an even length L and L/2 bins (``kernels.reference.spectrum``); a vector of odd length is padded with a
zero. The transform is orthogonal: an error has the same norm in the vector as in the bins.

Pieces are transformed in blocks that stay in the cache. The largest number of a block decides whether its squares and
sums are safe in float32; if not, the block is scaled near one by a power of two, and scaled back afterwards. Results
beyond float32 (a bin can be sqrt(L) times as large as the largest element) are saturated at 2^127.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Paused
from tersegrad.kernels.ops import SQUARES

PRIMES = (2, 3, 5, 7, 11, 13)  # a product of these is a fast length
LONGEST = 1 << 20  # piece: a block is at least one piece, and should be small compared with a gradient
BLOCK = 1 << 18  # elements transformed at a time: they stay in the cache, and a call costs little beside them
LIMIT = 2.0**127  # the largest number that comes out of a transform


def is_fast(length: int) -> bool:
    """Whether a piece may have this length: even, and a product of small primes.

    >>> [n for n in range(500, 515) if is_fast(n)]
    [500, 504, 512]
    """
    if length < 2 or length % 2:
        return False
    for prime in PRIMES:
        while length % prime == 0:
            length //= prime
    return length == 1


def fast_at_most(length: int) -> int:
    """The longest fast length that is at most this.

    >>> fast_at_most(511), fast_at_most(3)
    (504, 2)
    """
    if length < 2:
        raise ValueError(f"no fast length is at most {length}: the shortest is 2.")
    length -= length % 2
    while not is_fast(length):
        length -= 2
    return length


@dataclass(frozen=True)
class Run:
    """Consecutive pieces of one length; with ``positions`` > 1 each is a matrix that is read column by column."""

    start: int  # first element
    pieces: int
    length: int  # of each piece
    positions: int = 1  # columns of a piece seen as a matrix

    @property
    def stop(self) -> int:
        """The position after the last element."""
        return self.start + self.pieces * self.length

    @property
    def bins(self) -> int:
        """How many bins the pieces have together."""
        return self.pieces * self.length // 2

    def blocks(self) -> "Iterator[Run]":
        """The same pieces in runs of about ``BLOCK`` elements."""
        most = max(1, BLOCK // self.length)
        for first in range(0, self.pieces, most):
            pieces = min(most, self.pieces - first)
            yield Run(self.start + first * self.length, pieces, self.length, self.positions)

    def as_lines(self, part: Tensor) -> Tensor:
        """A view of the run's elements with every piece in the order in which it is transformed."""
        return part.view(self.pieces, -1, self.positions).transpose(1, 2)


def split_pieces(start: int, stop: int, length: int, positions: int = 1) -> list[Run]:
    """Pieces of ``length`` from an even ``start`` to an even ``stop``; the rest in the longest fast pieces that fit.

    >>> [(run.start, run.pieces, run.length) for run in split_pieces(0, 1030, 512)]
    [(0, 2, 512), (1024, 1, 6)]
    """
    runs = []
    while start < stop:
        length = min(length, fast_at_most(stop - start))
        pieces = (stop - start) // length
        runs.append(Run(start, pieces, length, positions if length % positions == 0 else 1))
        start += pieces * length
    return runs


def forward(x: Tensor, runs: list[Run], bins: Tensor, magnitudes: Tensor) -> Paused[bool]:
    """Write the bins of ``x`` and their magnitudes; False, and both are unspecified, if ``x`` is non-finite.

    It pauses: what follows depends on whether a block must be scaled. Blocks that must be are looked at once more.
    """
    parts = [
        (block, bins[block.start : block.stop], magnitudes[block.start // 2 : block.stop // 2])
        for run in runs
        for block in run.blocks()
    ]
    largest = yield tuple(_transform(read(x, block), *results) for block, *results in parts)
    unsafe = [part for part, top in zip(parts, largest, strict=True) if not _is_safe(top)]
    if not unsafe:
        return True
    largest = yield tuple(kernels.on(x).abs_max(read(x, block).reshape(-1)) for block, *_ in unsafe)
    if not all(map(math.isfinite, largest)):
        return False
    for (block, *results), top in zip(unsafe, largest, strict=True):
        exponent = math.frexp(top)[1]
        _transform(_shifted(read(x, block).clone(), -exponent), *results)
        for result in results:
            _shifted(result, exponent).clamp_(-LIMIT, LIMIT)
    return True


def inverse(bins: Tensor, runs: list[Run], out: Tensor, subtract: bool = False) -> None:
    """``out =`` (or ``out -=``) the vector of these bins. ``out`` may be the memory of ``bins``."""
    for run in runs:
        for block in run.blocks():
            _write(_inverse(bins[block.start : block.stop], block), block, out, subtract)


def _transform(pieces: Tensor, bins: Tensor, magnitudes: Tensor) -> kernels.Answer:
    """Write a block's bins and magnitudes; returns the largest bin, as magnitudes may underflow to zero."""
    kernel = kernels.on(pieces)
    kernel.fold(torch.fft.rfft(pieces, norm="ortho"), bins, magnitudes)
    largest: kernels.Answer = kernel.abs_max(bins)
    return largest


def _is_safe(largest: float) -> bool:
    return largest == 0 or SQUARES[0] <= largest <= SQUARES[1]


def _inverse(bins: Tensor, run: Run) -> Tensor:
    kernel = kernels.on(bins)
    half = torch.empty(run.pieces, run.length // 2 + 1, dtype=torch.complex64, device=bins.device)
    kernel.unfold(bins, half)
    (largest,) = kernels.read(kernel.abs_max(bins))
    if _is_safe(largest) or not math.isfinite(largest):
        return _irfft(half, run.length)
    exponent = math.frexp(largest)[1]
    _shifted(torch.view_as_real(half), -exponent)
    return _shifted(_irfft(half, run.length), exponent).clamp_(-LIMIT, LIMIT)


def _irfft(half: Tensor, length: int) -> Tensor:
    pieces: Tensor = torch.fft.irfft(half, n=length, norm="ortho")
    return pieces


def _shifted(x: Tensor, exponent: int) -> Tensor:
    """``x * 2**exponent`` in place; in two steps, as the power alone may overflow float32."""
    half = exponent // 2
    return x.mul_(2.0**half).mul_(2.0 ** (exponent - half))


def read(x: Tensor, run: Run) -> Tensor:
    """The run's pieces as rows, in the order in which they are transformed."""
    part = x[run.start : run.stop]
    if part.numel() < run.pieces * run.length:
        part = torch.nn.functional.pad(part, (0, 1))  # the zero at the end of a vector of odd length
    return run.as_lines(part).reshape(run.pieces, run.length)


def _write(pieces: Tensor, run: Run, out: Tensor, subtract: bool) -> None:
    part = out[run.start : run.stop]
    whole, padded = part, part.numel() < run.pieces * run.length
    if padded:
        whole = torch.nn.functional.pad(part, (0, 1))
    lines, pieces = run.as_lines(whole), pieces.view(run.pieces, run.positions, -1)
    lines.sub_(pieces) if subtract else lines.copy_(pieces)
    if padded:
        part.copy_(whole[:-1])
