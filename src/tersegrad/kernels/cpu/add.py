"""Sums of two whole vectors that are not read again soon (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.add``; here is only how.

An ordinary store first brings the line that it will overwrite into the cache: a sum then moves four vectors through
memory instead of three, and pushes out of the cache what others want there. A streaming store does neither. It is worth
a third of the time on an idle core, and more where several workers share the memory. A short sum is better left in the
cache for whoever reads it next.
"""

from typing import Any

import numba
import numba.extending
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu.select import _array
from tersegrad.kernels.reference import add as reference

__all__ = ["add_scaled"]

Floats = NDArray[np.float32]

LINE = 16  # floats in a cache line
LINE_NBYTES = 4 * LINE
LONG = 1 << 20  # elements from which on a sum is streamed


def add_scaled(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """``out = a + scale * b``, written past the caches if it is long."""
    if out.numel() < LONG:
        reference.add_scaled(a, b, scale, out)
    else:
        stream_scaled(a, b, scale, out)


def stream_scaled(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """``out = a + scale * b``, written past the caches."""
    reference.check_add(a, b, out)
    head = min(out.numel(), -out.data_ptr() % LINE_NBYTES // 4)  # elements before the first whole line
    _add_scaled(_array(a), _array(b), np.float32(scale), _array(out), head)


_intrinsic: Any = numba.extending.intrinsic  # as Numba types it, callers would have to pass ``typing``


@_intrinsic
def _stream_line(typing: Any, a: Any, b: Any, scale: Any, out: Any, start: Any) -> Any:
    """``out[start + j] = a[start + j] + scale * b[start + j]`` for 0 <= j < 16, which is a whole line of ``out``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), LINE)

        def address(place: int) -> Any:
            data = context.make_array(signature.args[place])(context, builder, args[place]).data
            return builder.bitcast(builder.gep(data, [args[4]]), line.as_pointer())

        undefined = ir.Constant(line, ir.Undefined)
        one = builder.insert_element(undefined, args[2], ir.Constant(ir.IntType(32), 0))
        scales = builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LINE), [0] * LINE))
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(line, [line] * 3), f"llvm.fma.v{LINE}f32")
        total = builder.call(fma, [builder.load(address(1), align=4), scales, builder.load(address(0), align=4)])
        store = builder.store(total, address(3), align=LINE_NBYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(a, b, types.float32, out, types.intp), generate


@_intrinsic
def _fence(typing: Any) -> Any:
    """Streaming stores are seen by other threads before anything that comes after this."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@numba.njit(nogil=True, cache=True)
def _add_scaled(a: Floats, b: Floats, scale: np.float32, out: Floats, head: int) -> None:
    end = head + (a.size - head) // LINE * LINE
    for i in range(head):
        out[i] = a[i] + scale * b[i]
    for start in range(head, end, LINE):
        _stream_line(a, b, scale, out, start)
    for i in range(end, a.size):
        out[i] = a[i] + scale * b[i]
    _fence()
