"""A sum of sparse vectors, written in one pass (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.sparse_sum``.

Adding one sparse vector after the other to a vector of zeros moves it through memory several times: 1 % of the elements
are on a seventh of the cache lines. Here each slice that fits into the cache gets its part of all vectors, and is then
streamed to its place.
"""

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Floats, Ints, array, float32
from tersegrad.kernels.cpu._intrinsics import intrinsic, pattern_of, pointer
from tersegrad.kernels.cpu._stream import LINE, LINE_NBYTES, LONG, fence, stream
from tersegrad.kernels.cpu.gather import scatter_add
from tersegrad.kernels.ops import check_ascending, check_counts

__all__ = ["scatter_sum"]

SLICE = 4096  # floats: half of an L1 cache


def scatter_sum(indices: Tensor, values: Tensor, counts: list[int], scale: float, out: Tensor) -> bool:
    """``out = scale * (sum of sparse vectors)``: in one pass if ``out`` is long and aligned to a cache line."""
    if out.numel() < LONG or out.data_ptr() % LINE_NBYTES:
        return sum_one_by_one(indices, values, counts, scale, out)
    return sum_streamed(indices, values, counts, scale, out)


def sum_one_by_one(indices: Tensor, values: Tensor, counts: list[int], scale: float, out: Tensor) -> bool:
    """Add one vector after the other: for a short ``out``, which stays in the cache."""
    check_counts(indices, values, counts)
    if not _ascends(array(indices, torch.int32), _ends(counts), out.numel()):
        check_ascending(indices, counts, out.numel())
    out.zero_()
    parts = zip(indices.split(counts), values.split(counts), strict=True)
    finite = [scatter_add(out, positions, part, scale) for positions, part in parts]
    return all(finite)


def sum_streamed(indices: Tensor, values: Tensor, counts: list[int], scale: float, out: Tensor) -> bool:
    """In one pass, whatever the length; ``out`` must be aligned to a cache line."""
    check_counts(indices, values, counts)
    positions = array(indices, torch.int32)
    largest = _scatter_sum(positions, array(values), _ends(counts), float32(scale), array(out))
    if largest < 0:
        check_ascending(indices, counts, out.numel())
    return bool(largest < INF_BITS)


def _ends(counts: list[int]) -> NDArray[np.int64]:
    return np.cumsum(np.array(counts, np.int64))


@intrinsic
def _stream_line(typing: Any, part_sum: Any, place: Any, out: Any, start: Any) -> Any:
    """``out[start + place + j] = part_sum[place + j]`` for 0 <= j < 16, which is a whole line of both."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), LINE)
        source = pointer(context, builder, signature.args[0], args[0], args[1], line)
        target = pointer(context, builder, signature.args[2], args[2], builder.add(args[3], args[1]), line)
        stream(builder, builder.load(source, align=4), target)
        return context.get_dummy_value()

    return types.void(part_sum, types.intp, out, types.intp), generate


@numba.njit(nogil=True, cache=True)
def _ascends(indices: Ints, ends: NDArray[np.int64], n: int) -> bool:
    begin = 0
    for end in ends:
        before = np.int32(-1)
        for i in range(begin, end):
            if indices[i] <= before:
                return False
            before = indices[i]
        if before >= n:
            return False
        begin = end
    return True


@numba.njit(nogil=True, cache=True)
def _scatter_sum(indices: Ints, values: Floats, ends: NDArray[np.int64], scale: np.float32, out: Floats) -> np.int32:
    """The largest magnitude bits of a partial sum; -1, and nothing is written, if an index is out of range or order."""
    n, largest = out.size, np.int32(0)
    if not _ascends(indices, ends, n):
        return np.int32(-1)
    part_sum = np.empty(SLICE, np.float32)
    cursors = np.zeros(ends.size, np.int64)
    cursors[1:] = ends[:-1]
    for start in range(0, n, SLICE):
        stop = min(start + SLICE, n)
        part_sum[:] = 0
        for vector in range(ends.size):
            cursor, end = cursors[vector], ends[vector]
            while cursor < end and indices[cursor] < stop:
                place = np.uint32(indices[cursor] - start)
                total = part_sum[place] + scale * values[cursor]
                part_sum[place] = total
                largest = max(largest, np.int32(pattern_of(total) & ABS_MASK))
                cursor += 1
            cursors[vector] = cursor
        whole = (stop - start) // LINE * LINE
        for line in range(0, whole, LINE):
            _stream_line(part_sum, line, out, start)
        out[start + whole : stop] = part_sum[whole : stop - start]
    fence()
    return largest
