"""What the samples of a batch contribute to one parameter's gradient: computed a few samples at a time and squared.

A term is one use of a parameter. Its gradients per sample are never all in memory: chunks of samples take at most
``ROOM`` floats (4 MB), or what a single sample needs where that is more.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tersegrad import kernels

ROOM = 1 << 20  # floats of workspace: the chunks of samples that one computation takes
CACHE = 1 << 18  # floats of gradient that are squared while they are still in the cache
ROWS = 64  # of a gradient matrix that are worth a matrix product
NARROW = 64  # columns; with fewer, the product is faster the other way round

Operands = Callable[[int, int], tuple[Tensor, Tensor]]


def chunks(samples: int, room: int) -> Iterator[tuple[int, int]]:
    """Stretches of samples that fit into ``ROOM`` if each takes ``room`` floats; never less than one sample.

    >>> list(chunks(5, ROOM // 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, ROOM // max(1, room))
    for first in range(0, samples, step):
        yield first, min(samples, first + step)


class Term(ABC):
    """One use of a parameter: how the gradient that it causes is made up of samples."""

    samples: int
    room: int  # floats that ``gradients`` takes for one sample, the result included

    @abstractmethod
    def gradients(self, first: int, last: int) -> Tensor:
        """The contributions of samples ``first`` to ``last - 1`` in float32: (samples, *shape of the parameter)."""

    @abstractmethod
    def reach(self) -> float:
        """At least the length that the gradient would have if nothing in it cancelled."""

    def add_squares(self, sums: Tensor) -> None:
        """``sums += sum over samples of contribution^2``."""
        for first, last in chunks(self.samples, self.room):
            kernels.on(sums).add_squares(sums.view(-1), self.gradients(first, last).reshape(-1))


class Each(Term):
    """A term whose gradients are sums of ``values(first, last)`` over positions: those of biases and norms."""

    def __init__(
        self, samples: int, room: int, values: Callable[[int, int], Tensor], total: Callable[[Tensor], Tensor]
    ):
        self.samples = samples
        self.room = room
        self._values = values
        self._total = total

    def gradients(self, first: int, last: int) -> Tensor:
        """Sums over positions."""
        return self._total(self._values(first, last))

    def reach(self) -> float:
        """By Cauchy and Schwarz."""
        parts = (self._values(first, last) for first, last in chunks(self.samples, self.room))
        return sum(math.sqrt(part.numel()) * float(part.float().norm()) for part in parts)


class Together(Term):
    """Several uses of one parameter: each sample's contributions are summed before they are squared."""

    def __init__(self, terms: Sequence[Term]):
        self._terms = terms
        self.samples = terms[0].samples
        self.room = sum(term.room for term in terms)

    def gradients(self, first: int, last: int) -> Tensor:
        """The sum over uses."""
        total = self._terms[0].gradients(first, last)
        for term in self._terms[1:]:
            total = total + term.gradients(first, last)
        return total

    def reach(self) -> float:
        """All of them together."""
        return sum(term.reach() for term in self._terms)


class Products(Term):
    """A matrix whose gradient is a sum of outer products over positions (time, pixels): dense layers, convolutions.

    ``operands(first, last)`` gives ``left`` (samples * groups, rows, positions) and ``right`` (samples * groups,
    positions, columns); a sample's gradient is left @ right. It comes in the shape ``made``, which is the parameter's
    after ``permute(order)``. ``room`` is what the operands of one sample take.

    With a single position (a dense layer on plain vectors) no gradient is ever made: the square of a product is the
    product of squares, so the sum over samples is one matrix product, (left^2)^T @ (right^2).
    """

    def __init__(
        self,
        samples: int,
        operands: Operands,
        room: int,
        positions: int,
        made: Sequence[int],
        order: Sequence[int] | None = None,
        groups: int = 1,
    ):
        self.samples = samples
        self.room = room + math.prod(made)
        self._operands = operands
        self._operand_room = max(1, room)
        self._positions = positions
        self._made = tuple(made)
        self._order = order
        self._groups = groups

    def gradients(self, first: int, last: int) -> Tensor:
        """One matrix product per sample."""
        left, right = self._operands(first, last)
        made = torch.bmm(left, right).view(last - first, *self._made)
        return made if self._order is None else made.permute(0, *(1 + axis for axis in self._order))

    def reach(self) -> float:
        """By Cauchy and Schwarz."""
        norms = 0.0
        for first, last in chunks(self.samples, self._operand_room):
            left, right = self._operands(first, last)
            norms += float(left.norm()) * float(right.norm())
        return norms

    def add_squares(self, sums: Tensor) -> None:
        """Without ever holding more than some rows of some samples' gradients."""
        total = sums.view(self._made) if self._order is None else sums.new_zeros(self._made)
        matrix = total.view(self._made[0], -1)
        rows, columns = matrix.shape
        if self._groups > 1:
            self._add_tiles(matrix, self._operands)
        elif self._positions == 1:
            self._add_squared_factors(matrix)
        elif columns < min(rows, NARROW):
            transposed = matrix.new_zeros(columns, rows)
            self._add_tiles(transposed, self._swapped)
            matrix += transposed.t()
        else:
            self._add_tiles(matrix, self._operands)
        if self._order is not None:
            sums += total.permute(*self._order)

    def _swapped(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        left, right = self._operands(first, last)
        return right.transpose(1, 2), left.transpose(1, 2)

    def _add_squared_factors(self, matrix: Tensor) -> None:
        for first, last in chunks(self.samples, sum(matrix.shape) + self._operand_room):
            left, right = self._operands(first, last)
            matrix.addmm_(left.squeeze(2).square().t(), right.squeeze(1).square())

    def _add_tiles(self, matrix: Tensor, operands: Operands) -> None:
        """Some samples at a time, and of their gradients some rows, which are squared while they are in the cache."""
        rows, columns = matrix.shape
        least = rows if self._groups > 1 else min(rows, ROWS)
        step = max(1, min(self.samples, ROOM // 2 // self._operand_room, CACHE // (least * columns)))
        height = rows if self._groups > 1 else max(1, CACHE // (step * columns))
        tile = matrix.new_empty(step * min(rows, height) * columns)
        for first in range(0, self.samples, step):
            left, right = operands(first, min(self.samples, first + step))
            for top in range(0, rows, height):
                stretch = matrix[top : top + height].view(-1)
                gradients = tile[: left.shape[0] // self._groups * stretch.numel()]
                torch.bmm(left[:, top : top + height], right, out=gradients.view(left.shape[0], -1, columns))
                kernels.on(matrix).add_squares(stretch, gradients)


class Tokens(Term):
    """The rows of an embedding: ``deltas`` (samples, length, width) belong to ``tokens`` (samples, length)."""

    def __init__(self, tokens: Tensor, deltas: Tensor, words: int, skip: int | None):
        self.samples = tokens.shape[0]
        self.room = words * deltas.shape[2]
        self._tokens = tokens
        self._deltas = deltas
        self._words = words
        self._skip = -1 if skip is None else skip

    def gradients(self, first: int, last: int) -> Tensor:
        """Dense, for a table that is tied to another layer: words * width floats per sample."""
        tokens, deltas = self._chunk(first, last)
        rows = torch.zeros((last - first) * self._words, deltas.shape[2], device=deltas.device)
        start = self._words * torch.arange(last - first, device=tokens.device)[:, None]
        rows.index_add_(0, (start + tokens).flatten(), deltas.flatten(0, 1))
        dense = rows.view(last - first, self._words, -1)
        if self._skip >= 0:
            dense[:, self._skip] = 0
        return dense

    def reach(self) -> float:
        """By Cauchy and Schwarz."""
        return math.sqrt(self._deltas.numel()) * float(self._deltas.float().norm())

    def add_squares(self, sums: Tensor) -> None:
        """Only the rows that occur: a word that a sample repeats is summed before it is squared."""
        for first, last in chunks(self.samples, 2 * self._deltas.shape[1] * self._deltas.shape[2]):
            tokens, deltas = self._chunk(first, last)
            flat = tokens.reshape(-1).contiguous(), deltas.reshape(-1).contiguous()
            kernels.on(sums).add_token_squares(sums.view(-1), *flat, last - first, self._skip)

    def _chunk(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        return self._tokens[first:last].long(), self._deltas[first:last].float()
