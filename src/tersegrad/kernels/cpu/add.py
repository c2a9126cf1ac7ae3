"""Sums of two whole vectors, streamed past the caches if they are long (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.add``; ``_stream`` explains streaming.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Floats, array
from tersegrad.kernels.cpu._intrinsics import intrinsic, pointer, splat
from tersegrad.kernels.cpu._stream import LINE, LINE_NBYTES, LONG, fence, stream
from tersegrad.kernels.ops import check_add
from tersegrad.kernels.reference import add as reference

__all__ = ["add_scaled"]


def add_scaled(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """``out = a + scale * b``, with streaming stores if it is long."""
    if out.numel() < LONG:
        reference.add_scaled(a, b, scale, out)
    else:
        stream_scaled(a, b, scale, out)


def stream_scaled(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """``out = a + scale * b``, with streaming stores whatever the length."""
    check_add(a, b, out)
    head = min(out.numel(), -out.data_ptr() % LINE_NBYTES // 4)  # elements before the first whole line
    _add_scaled(array(a), array(b), np.float32(scale), array(out), head)


@intrinsic
def _stream_line(typing: Any, a: Any, b: Any, scale: Any, out: Any, start: Any) -> Any:
    """``out[start + j] = a[start + j] + scale * b[start + j]`` for 0 <= j < 16, which is a whole line of ``out``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), LINE)

        def address(place: int) -> Any:
            return pointer(context, builder, signature.args[place], args[place], args[4], line)

        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(line, [line] * 3), f"llvm.fma.v{LINE}f32")
        factors = builder.load(address(1), align=4), splat(builder, args[2], line)
        stream(builder, builder.call(fma, [*factors, builder.load(address(0), align=4)]), address(3))
        return context.get_dummy_value()

    return types.void(a, b, types.float32, out, types.intp), generate


@numba.njit(nogil=True, cache=True)
def _add_scaled(a: Floats, b: Floats, scale: np.float32, out: Floats, head: int) -> None:
    end = head + (a.size - head) // LINE * LINE
    for i in range(head):
        out[i] = a[i] + scale * b[i]
    for start in range(head, end, LINE):
        _stream_line(a, b, scale, out, start)
    for i in range(end, a.size):
        out[i] = a[i] + scale * b[i]
    fence()
