"""The contributions of samples to one parameter's gradient, computed a few samples at a time and squared.

A term is one use of a parameter. Its gradients per sample are never all in memory: a chunk of samples takes at most
``WORKSPACE`` floats (4 MB), or as many as a single sample needs if that is more.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tersegrad import kernels

WORKSPACE = 1 << 20  # capacity of the workspace in floats: limits the samples per chunk
CACHE = 1 << 18  # floats of gradient that are squared while they are still in the cache
SHARE = 8  # of a batch's samples, one in so many is looked at in estimates
LEAST = 4  # samples that an estimate looks at
ROWS = 64  # of a gradient matrix, at least, for one matrix product
NARROW = 64  # columns; with fewer, the transposed product is faster

Operands = Callable[[int, int], tuple[Tensor, Tensor]]


def chunks(samples: int, workspace: int) -> Iterator[tuple[int, int]]:
    """Ranges of samples that fit into ``WORKSPACE`` floats if each takes ``workspace``; at least one sample each.

    >>> list(chunks(5, WORKSPACE // 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, WORKSPACE // max(1, workspace))
    for first in range(0, samples, step):
        yield first, min(samples, first + step)


class Term(ABC):
    """One use of a parameter: its gradient as a sum over samples."""

    samples: int
    workspace: int  # floats of workspace per sample in ``gradients``, including the result
    cheap: bool = False  # whether all squares are to be had for less than the gradient itself

    @abstractmethod
    def part(self, first: int, last: int) -> "Term":
        """The same for samples ``first`` to ``last - 1`` only."""

    @abstractmethod
    def gradients(self, first: int, last: int) -> Tensor:
        """The contributions of samples ``first`` to ``last - 1`` in float32: (samples, *shape of the parameter)."""

    @abstractmethod
    def reach(self) -> float:
        """An upper bound of the norm that the gradient would have without cancellation."""

    def add_squares(self, sums: Tensor) -> None:
        """``sums += sum over samples of contribution^2``."""
        for first, last in chunks(self.samples, self.workspace):
            kernels.on(sums).add_squares(sums.view(-1), self.gradients(first, last).reshape(-1))

    def add_estimate(self, sums: Tensor, start: int) -> None:
        """``add_squares`` of one in ``SHARE`` samples, from ``start`` on in a circle, times what stands for the others.

        If each start is as likely as any other, it is right on average.
        """
        count = max(-(-self.samples // SHARE), LEAST)
        if self.cheap or count >= self.samples:
            self.add_squares(sums)
            return
        found = torch.zeros_like(sums)
        for first in (start, start - self.samples):  # the circle's end may lie behind its beginning
            if (begin := max(0, first)) < (end := min(self.samples, first + count)):
                self.part(begin, end).add_squares(found)
        sums.add_(found, alpha=self.samples / count)


class Each(Term):
    """A term whose gradients are sums of ``values(first, last)`` over positions, as for biases and norms."""

    def __init__(
        self, samples: int, workspace: int, values: Callable[[int, int], Tensor], total: Callable[[Tensor], Tensor]
    ):
        self.samples = samples
        self.workspace = workspace
        self._values = values
        self._total = total

    def part(self, first: int, last: int) -> "Each":
        return Each(last - first, self.workspace, lambda a, b: self._values(first + a, first + b), self._total)

    def gradients(self, first: int, last: int) -> Tensor:
        return self._total(self._values(first, last))

    def reach(self) -> float:
        """By Cauchy and Schwarz."""
        parts = (self._values(first, last) for first, last in chunks(self.samples, self.workspace))
        return sum(math.sqrt(part.numel()) * float(part.float().norm()) for part in parts)


class Together(Term):
    """Several uses of one parameter: each sample's contributions are summed before they are squared."""

    def __init__(self, terms: Sequence[Term]):
        self._terms = terms
        self.samples = terms[0].samples
        self.workspace = sum(term.workspace for term in terms)

    def part(self, first: int, last: int) -> "Together":
        return Together([term.part(first, last) for term in self._terms])

    def gradients(self, first: int, last: int) -> Tensor:
        total = self._terms[0].gradients(first, last)
        for term in self._terms[1:]:
            total = total + term.gradients(first, last)
        return total

    def reach(self) -> float:
        return sum(term.reach() for term in self._terms)


class Products(Term):
    """A matrix whose gradient is a sum of outer products over positions (time, pixels): dense layers, convolutions.

    ``operands(first, last)`` gives ``left`` (samples * groups, rows, positions) and ``right`` (samples * groups,
    positions, columns); a sample's gradient is left @ right. It has the shape ``made``, which is the parameter's
    after ``permute(order)``. ``workspace`` is the number of floats of the operands of one sample.

    With a single position (a dense layer on vectors) no gradient is computed: the square of a product is the
    product of squares, so the sum over samples is one matrix product, (left^2)^T @ (right^2).
    """

    def __init__(
        self,
        samples: int,
        operands: Operands,
        workspace: int,
        positions: int,
        made: Sequence[int],
        order: Sequence[int] | None = None,
        groups: int = 1,
    ):
        self.samples = samples
        self.workspace = workspace + math.prod(made)
        self._operands = operands
        self._operand_workspace = max(1, workspace)
        self._positions = positions
        self._made = tuple(made)
        self._order = order
        self._groups = groups
        self.cheap = positions == 1

    def part(self, first: int, last: int) -> "Products":
        def operands(a: int, b: int) -> tuple[Tensor, Tensor]:
            return self._operands(first + a, first + b)

        about = self._operand_workspace, self._positions, self._made, self._order, self._groups
        return Products(last - first, operands, *about)

    def gradients(self, first: int, last: int) -> Tensor:
        left, right = self._operands(first, last)
        made = torch.bmm(left, right).view(last - first, *self._made)
        return made if self._order is None else made.permute(0, *(1 + axis for axis in self._order))

    def reach(self) -> float:
        """By Cauchy and Schwarz."""
        norms = 0.0
        for first, last in chunks(self.samples, self._operand_workspace):
            left, right = self._operands(first, last)
            norms += float(left.norm()) * float(right.norm())
        return norms

    def add_squares(self, sums: Tensor) -> None:
        """Only some rows of some samples' gradients are in memory at a time."""
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
        for first, last in chunks(self.samples, sum(matrix.shape) + self._operand_workspace):
            left, right = self._operands(first, last)
            matrix.addmm_(left.squeeze(2).square().t(), right.squeeze(1).square())

    def _add_tiles(self, matrix: Tensor, operands: Operands) -> None:
        """Some samples at a time, and some rows of their gradients, which are squared while they are in the cache."""
        rows, columns = matrix.shape
        least = rows if self._groups > 1 else min(rows, ROWS)
        step = max(1, min(self.samples, WORKSPACE // 2 // self._operand_workspace, CACHE // (least * columns)))
        height = rows if self._groups > 1 else max(1, CACHE // (step * columns))
        tile = matrix.new_empty(step * min(rows, height) * columns)
        for first in range(0, self.samples, step):
            left, right = operands(first, min(self.samples, first + step))
            for top in range(0, rows, height):
                rows_sums = matrix[top : top + height].view(-1)
                gradients = tile[: left.shape[0] // self._groups * rows_sums.numel()]
                torch.bmm(left[:, top : top + height], right, out=gradients.view(left.shape[0], -1, columns))
                kernels.on(matrix).add_squares(rows_sums, gradients)


class Tokens(Term):
    """The rows of an embedding: ``deltas`` (samples, length, width) belong to ``tokens`` (samples, length)."""

    def __init__(self, tokens: Tensor, deltas: Tensor, words: int, skip: int | None):
        self.samples = tokens.shape[0]
        self.workspace = words * deltas.shape[2]
        self._tokens = tokens
        self._deltas = deltas
        self._words = words
        self._skip = -1 if skip is None else skip
        self.cheap = True

    def part(self, first: int, last: int) -> "Tokens":
        return Tokens(self._tokens[first:last], self._deltas[first:last], self._words, self._skip)

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
        """Only the rows that occur; the rows of a word that a sample repeats are summed before squaring."""
        for first, last in chunks(self.samples, 2 * self._deltas.shape[1] * self._deltas.shape[2]):
            tokens, deltas = self._chunk(first, last)
            flat = tokens.reshape(-1).contiguous(), deltas.reshape(-1).contiguous()
            kernels.on(sums).add_token_squares(sums.view(-1), *flat, last - first, self._skip)

    def _chunk(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        return self._tokens[first:last].long(), self._deltas[first:last].float()
