"""PowerSGD: every matrix of the bucket as a product of two thin matrices, by one step of power iteration.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization",
NeurIPS 2019.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import (
    Comm,
    Finish,
    Layout,
    Reducer,
    State,
    Step,
    Vector,
    added,
    back_buffer,
    mix_seed,
    nothing_left,
    param,
    scratch,
    stage,
)


@dataclass(frozen=True, repr=False)
class PowerSGD(Reducer):
    """Sends r (n + m) numbers of an n x m gradient: its projection on r directions, refined at every step.

    Worker w reshapes every tensor to a matrix M_w, its first dimension by the rest. With the Q of the last step:

        P = orthonormal(mean of M_w Q);  Q_w = M_w^T P;  Q = mean of Q_w;  out = P Q^T

    The worker's own contribution is P Q_w^T, the mean of which is ``out``: M_w - P Q_w^T stays in ``x``. Vectors, and
    matrices without r (n + m) < n m, are reduced uncompressed. There are two all-reduces per bucket.

    Q is orthonormalised for the next step. Every worker orthonormalises P and Q itself, from the same bits; the results
    are the same only if all workers have the same processors and libraries.
    """

    examples: ClassVar[tuple[str, ...]] = ("PowerSGD()", "PowerSGD(rank=1)", "ErrorFeedback(PowerSGD(rank=4))")

    rank: int = param(2, "r: lower => fewer bytes, coarser")

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"PowerSGD(rank={self.rank!r}): a rank is a whole number from 1 on. Write e.g. rank=2.")

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is sent as two thin matrices."""
        return bool(_Plan(Layout(("x",), (shape,)), self.rank).matrices)

    def init(self, layout: Layout, comm: Comm) -> State:
        """A random Q for every matrix, the same on all workers and independent of the bucket."""
        factors: State = {}
        for matrix in _Plan(layout, self.rank).matrices:
            part = layout.subset([matrix.member])
            generator = torch.Generator().manual_seed(mix_seed(layout.seed, part.id))
            start = torch.randn(matrix.columns, matrix.rank, generator=generator)
            q = _orthonormal(start[None])[0].to(layout.device)
            factors[f"tensor {part.names[0]}"] = {"names": list(part.names), "q": q}
        return {"factors": factors}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Two rounds: P and all uncompressed tensors; then Q, which is still in flight when this returns."""
        x = added(x)
        layout = step.layout
        plan: _Plan = state.get("_plan") or _Plan(layout, self.rank)
        state["_plan"] = plan
        factors = [state["factors"][f"tensor {layout.names[matrix.member]}"] for matrix in plan.matrices]
        first = scratch(state, "first", plan.ps.stop, torch.float32, x.device)
        self._make_first(x, first, factors, plan)
        comm.all_reduce(first.div_(comm.size))
        if not all(kernels.read(kernels.on(first).all_finite(first))):
            out.fill_(math.nan)  # on all workers alike, so all of them stop here
            return lambda: False
        plan.unpack_dense(first, x, out)
        if not plan.matrices:
            return nothing_left
        plan.ps.orthonormalise(first)
        own = scratch(state, "own", plan.qs.stop, torch.float32, x.device)
        self._make_second(x, first, own, plan)
        second = scratch(state, "second", plan.qs.stop, torch.float32, x.device)
        pending = comm.start_all_reduce(torch.div(own, comm.size, out=second))

        def finish() -> None:
            pending.wait()
            self._project(x, out, first, own, second, plan)
            plan.qs.orthonormalise(second)
            for matrix, factor in zip(plan.matrices, factors, strict=True):
                stage(factor, q=back_buffer(factor, "q").copy_(matrix.q(second)))

        return finish

    @staticmethod
    def _make_first(x: Tensor, first: Tensor, factors: list[State], plan: "_Plan") -> None:
        """Write M_w Q and the uncompressed tensors; NaN if anything is non-finite, as zeros in Q could hide it."""
        if not all(kernels.read(kernels.on(x).all_finite(x))):
            first.fill_(math.nan)
            return
        plan.pack_dense(x, first)
        for matrix, factor in zip(plan.matrices, factors, strict=True):
            torch.mm(matrix.of(x), factor["q"], out=matrix.p(first))

    @staticmethod
    def _make_second(x: Tensor, first: Tensor, own: Tensor, plan: "_Plan") -> None:
        """Q_w = M_w^T P."""
        for matrix in plan.matrices:
            torch.mm(matrix.of(x).t(), matrix.p(first), out=matrix.q(own))

    @staticmethod
    def _project(x: Tensor, out: Tensor, first: Tensor, own: Tensor, second: Tensor, plan: "_Plan") -> None:
        """``out = P Q^T``, and ``x -= P Q_w^T``."""
        for matrix in plan.matrices:
            if out is not x:
                matrix.of(x).addmm_(matrix.p(first), matrix.q(own).t(), alpha=-1)
            torch.mm(matrix.p(first), matrix.q(second).t(), out=matrix.of(out))


@dataclass
class _Matrix:
    """One tensor of the bucket as a matrix, and the places of its P and Q in the two messages."""

    member: int  # index of the tensor in the bucket
    start: int
    rows: int
    columns: int
    rank: int
    p_start: int = 0
    q_start: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """A view of this matrix in a vector of the bucket."""
        return whole[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def p(self, first: Tensor) -> Tensor:
        return first[self.p_start : self.p_start + self.rows * self.rank].view(self.rows, self.rank)

    def q(self, second: Tensor) -> Tensor:
        return second[self.q_start : self.q_start + self.columns * self.rank].view(self.columns, self.rank)


class _Plan:
    """Which tensors are compressed and which are not, and the layout of the two messages."""

    def __init__(self, layout: Layout, rank: int):
        self.matrices: list[_Matrix] = []
        self.dense: list[tuple[int, int]] = []  # start and length
        for i, (shape, start, size) in enumerate(zip(layout.shapes, layout.offsets, layout.sizes, strict=False)):
            rows = shape[0] if shape else 1
            columns = size // rows if rows else 0
            r = min(rank, rows, columns)
            if len(shape) > 1 and r * (rows + columns) < size:
                self.matrices.append(_Matrix(i, start, rows, columns, r))
            elif size:
                self.dense.append((start, size))
        self.ps = _Thin([(m.rows, m.rank) for m in self.matrices], sum(size for _, size in self.dense))
        self.qs = _Thin([(m.columns, m.rank) for m in self.matrices], 0)
        for i, matrix in enumerate(self.matrices):
            matrix.p_start, matrix.q_start = self.ps.starts[i], self.qs.starts[i]

    def pack_dense(self, x: Tensor, first: Tensor) -> None:
        """Copy the uncompressed tensors to the beginning of the first message."""
        if self.dense:
            torch._foreach_copy_(self._packed(first), self._in_place(x))

    def unpack_dense(self, first: Tensor, x: Tensor, out: Tensor) -> None:
        """Copy the means of the uncompressed tensors to ``out``, and leave nothing of them in ``x``."""
        if self.dense:
            torch._foreach_copy_(self._in_place(out), self._packed(first))
        if self.dense and out is not x:
            torch._foreach_zero_(self._in_place(x))

    def _packed(self, first: Tensor) -> list[Tensor]:
        sizes = [size for _, size in self.dense]
        return list(first[: sum(sizes)].split(sizes))

    def _in_place(self, whole: Tensor) -> list[Tensor]:
        return [whole[start : start + size] for start, size in self.dense]


class _Thin:
    """The places of thin matrices in a message: those of one shape are adjacent, and handled in one batched call."""

    def __init__(self, shapes: list[tuple[int, int]], start: int):
        self.starts = [0] * len(shapes)
        self.batches: list[tuple[int, int, tuple[int, int]]] = []  # start, count and shape
        for shape in dict.fromkeys(shapes):
            members = [i for i, other in enumerate(shapes) if other == shape]
            self.batches.append((start, len(members), shape))
            for i in members:
                self.starts[i] = start
                start += math.prod(shape)
        self.stop = start

    def orthonormalise(self, message: Tensor) -> None:
        """Orthonormalise the columns of every matrix in the message, in place."""
        for start, count, shape in self.batches:
            batch = message[start : start + count * math.prod(shape)].view(count, *shape)
            batch.copy_(_orthonormal(batch))


def _orthonormal(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span those of each matrix; completed by others if the matrix is rank-deficient.

    In float64, in which no square of a float32 overflows or underflows.
    """
    wide: Tensor = torch.linalg.qr(matrices.double()).Q
    return wide.float()
