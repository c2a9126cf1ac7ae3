"""Adding two vectors and selecting from their sum in one pass (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.topk_of_sum``. The largest elements are
collected while the sum is streamed to memory, so it need not be read again.
"""

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from torch import Tensor

from tersegrad.kernels.cpu._arrays import ABS_MASK, INF_BITS, Floats, Ints, array
from tersegrad.kernels.cpu._candidates import (
    HISTOGRAM,
    Histogram,
    choose,
    guess,
    place_drawn,
    raised,
    sample_width,
    split_candidates,
)
from tersegrad.kernels.cpu._intrinsics import WORD, intrinsic, lowest, pattern_of, pointer, reaching
from tersegrad.kernels.cpu._stream import LINE_NBYTES, LONG, fence, stream
from tersegrad.kernels.cpu.add import add_scaled
from tersegrad.kernels.cpu.select import top_k
from tersegrad.kernels.ops import check_add, check_top_k

__all__ = ["add_top_k"]


def add_top_k(a: Tensor, b: Tensor, k: int, total: Tensor, indices: Tensor, candidates: Tensor) -> int:
    """``total = a + b``, and ``top_k`` of it: in one pass if ``total`` is long and aligned to a cache line."""
    if total.numel() < LONG or total.data_ptr() % LINE_NBYTES or k == 0:
        add_scaled(a, b, 1.0, total)
        return top_k(total, k, indices, candidates)
    return add_top_k_streamed(a, b, k, total, indices, candidates)


def add_top_k_streamed(a: Tensor, b: Tensor, k: int, total: Tensor, indices: Tensor, candidates: Tensor) -> int:
    """In one pass, whatever the length; ``total`` must be aligned to a cache line, and k > 0."""
    check_add(a, b, total)
    check_top_k(total, k, indices, candidates)
    buffers = split_candidates(candidates, total.numel(), k)
    return int(_add_top_k(array(a), array(b), k, array(total), array(indices, torch.int32), *buffers))


@intrinsic
def _sum_hits(typing: Any, a: Any, b: Any, total: Any, start: Any, low: Any) -> Any:
    """Stream the 64 sums from ``start`` on to ``total``, and return ``hits`` of them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block, integers = ir.VectorType(ir.FloatType(), WORD), ir.VectorType(ir.IntType(32), WORD)

        def address(place: int) -> Any:
            return pointer(context, builder, signature.args[place], args[place], args[3], block)

        sums = builder.fadd(builder.load(address(0), align=4), builder.load(address(1), align=4))
        stream(builder, sums, address(2))
        return reaching(builder, builder.bitcast(sums, integers), args[4])

    return types.uint64(a, b, total, types.intp, types.int32), generate


@numba.njit(nogil=True, cache=True)
def _add_top_k(a: Floats, b: Floats, k: int, total: Floats, indices: Ints, positions: Ints, keys: Ints) -> int:
    histogram = np.empty(HISTOGRAM, np.int64)
    width = sample_width(a.size, k, keys.size)
    if width > 0:
        for i in range(a.size // width):
            place = place_drawn(i, width)
            keys[i] = pattern_of(a[place] + b[place]) & ABS_MASK
    low = guess(a.size, k, width, keys, histogram)
    count = _add_and_collect(a, b, k, low, total, positions, keys, histogram)
    fence()
    return choose(total.view(np.int32), k, indices, positions, keys, count, histogram)


@numba.njit(nogil=True, cache=True)
def _add_and_collect(
    a: Floats, b: Floats, k: int, low: np.int32, total: Floats, positions: Ints, keys: Ints, histogram: Histogram
) -> int:
    """``collect`` of a sum. Streamed values are not in the cache, so a key is recomputed from ``a`` and ``b``."""
    n, capacity, count = a.size, keys.size - WORD, 0
    for start in range(0, n - n % WORD, WORD):
        word = _sum_hits(a, b, total, start, low)
        while word != 0:
            i = start + lowest(word)
            positions[count] = i
            keys[count] = pattern_of(a[i] + b[i]) & ABS_MASK
            count += 1
            word &= word - np.uint64(1)
        if count > capacity:
            count, low = k, raised(k, positions, keys, count, histogram)
            if low > INF_BITS:
                return count
    for i in range(n - n % WORD, n):
        total[i] = a[i] + b[i]
        key = np.int32(pattern_of(total[i]) & ABS_MASK)
        if key >= low:
            positions[count] = i
            keys[count] = key
            count += 1
    return count
