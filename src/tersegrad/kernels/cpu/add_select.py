"""Adding two vectors and selecting from their sum in one pass (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.add_select``; here is only how: as the sum
is streamed to memory (``add.py``), its largest elements are collected on the way (``select.py``), and it need not be
read again.
"""

from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from torch import Tensor

from tersegrad.kernels.cpu import select
from tersegrad.kernels.cpu.add import LINE_NBYTES, LONG, _fence, add_scaled
from tersegrad.kernels.cpu.select import (
    ABS_MASK,
    BLOCK,
    HISTOGRAM,
    INF_BITS,
    Floats,
    Histogram,
    Ints,
    _array,
    _bits_of,
    _choose,
    _guess,
    _lowest,
    _place_drawn,
    _raised,
    _sample_width,
)
from tersegrad.kernels.reference.add import check_add
from tersegrad.kernels.reference.select import check_top_k

__all__ = ["add_top_k"]


def add_top_k(a: Tensor, b: Tensor, k: int, total: Tensor, indices: Tensor, candidates: Tensor) -> int:
    """``total = a + b``, and ``top_k`` of it: in one pass if it is long, and not cut out of the middle of a line."""
    if total.numel() < LONG or total.data_ptr() % LINE_NBYTES or k == 0:
        add_scaled(a, b, 1.0, total)
        return select.top_k(total, k, indices, candidates)
    return add_top_k_streamed(a, b, k, total, indices, candidates)


def add_top_k_streamed(a: Tensor, b: Tensor, k: int, total: Tensor, indices: Tensor, candidates: Tensor) -> int:
    """In one pass, whatever the length; ``total`` begins with a line, and k > 0."""
    check_add(a, b, total)
    check_top_k(total, k, indices, candidates)
    room = select._split_candidates(candidates, total.numel(), k)
    return int(_add_top_k(_array(a), _array(b), k, _array(total), _array(indices, torch.int32), *room))


_intrinsic: Any = numba.extending.intrinsic  # as Numba types it, callers would have to pass ``typing``


@_intrinsic
def _sum_hits(typing: Any, a: Any, b: Any, total: Any, start: Any, low: Any) -> Any:
    """Streams the 64 sums from ``start`` on to ``total``, and gives what ``select._hits`` would of them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block, integers = ir.VectorType(ir.FloatType(), BLOCK), ir.VectorType(ir.IntType(32), BLOCK)

        def address(place: int) -> Any:
            data = context.make_array(signature.args[place])(context, builder, args[place]).data
            return builder.bitcast(builder.gep(data, [args[3]]), block.as_pointer())

        sums = builder.fadd(builder.load(address(0), align=4), builder.load(address(1), align=4))
        store = builder.store(sums, address(2), align=LINE_NBYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        mask = ir.Constant(integers, [int(ABS_MASK)] * BLOCK)
        magnitudes = builder.and_(builder.bitcast(sums, integers), mask)
        undefined = ir.Constant(integers, ir.Undefined)
        one = builder.insert_element(undefined, args[4], ir.Constant(ir.IntType(32), 0))
        lows = builder.shuffle_vector(one, undefined, ir.Constant(integers, [0] * BLOCK))
        return builder.bitcast(builder.icmp_signed(">=", magnitudes, lows), ir.IntType(BLOCK))

    return types.uint64(a, b, total, types.intp, types.int32), generate


@numba.njit(nogil=True, cache=True)
def _add_top_k(a: Floats, b: Floats, k: int, total: Floats, indices: Ints, positions: Ints, keys: Ints) -> int:
    histogram = np.empty(HISTOGRAM, np.int64)
    width = _sample_width(a.size, k, keys.size)
    if width > 0:
        for i in range(a.size // width):
            place = _place_drawn(i, width)
            keys[i] = _bits_of(a[place] + b[place]) & ABS_MASK
    low = _guess(a.size, k, width, keys, histogram)
    count = _add_and_collect(a, b, k, low, total, positions, keys, histogram)
    _fence()
    return _choose(total.view(np.int32), k, indices, positions, keys, count, histogram)


@numba.njit(nogil=True, cache=True)
def _add_and_collect(
    a: Floats, b: Floats, k: int, low: np.int32, total: Floats, positions: Ints, keys: Ints, histogram: Histogram
) -> int:
    """As ``select._collect``. What was just streamed is far away: a key is added up again from what is near."""
    n, room, count = a.size, keys.size - BLOCK, 0
    for start in range(0, n - n % BLOCK, BLOCK):
        word = _sum_hits(a, b, total, start, low)
        while word != 0:
            i = start + _lowest(word)
            positions[count] = i
            keys[count] = _bits_of(a[i] + b[i]) & ABS_MASK
            count += 1
            word &= word - np.uint64(1)
        if count > room:
            count, low = k, _raised(k, positions, keys, count, histogram)
            if low > INF_BITS:
                return count
    for i in range(n - n % BLOCK, n):
        total[i] = a[i] + b[i]
        key = np.int32(_bits_of(total[i]) & ABS_MASK)
        if key >= low:
            positions[count] = i
            keys[count] = key
            count += 1
    return count
