"""Which elements are unambiguous (VGC): one pass that reads three vectors, writes one, and notes positions."""

from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu.select import _array, _lowest
from tersegrad.kernels.reference.variance import LARGEST, check_variance

__all__ = ["unambiguous"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

LANES = 32  # elements tested at once: two masks of so many bits fill a machine word
_LARGEST = np.float32(LARGEST)


def unambiguous(
    x: Tensor,
    variance: Tensor,
    squares: Tensor,
    alpha: float,
    zeta: float,
    tau: float,
    next_variance: Tensor,
    indices: Tensor,
) -> int:
    """Positions with ``x^2 > alpha (variance + squares)`` and ``|x| > tau``, and the next variance; see reference."""
    check_variance(x, variance, squares, next_variance, alpha, zeta, tau)
    constants = np.array([alpha, zeta, tau], np.float32)
    arrays = _array(x), _array(variance), _array(squares), _array(next_variance)
    return int(_unambiguous(*arrays, _array(indices, torch.int32), *constants))


# --- the test of a block, in LLVM's terms: as a loop, four arrays that might overlap are not made a vector of

_intrinsic: Any = numba.extending.intrinsic


@_intrinsic
def _test_block(
    typing: Any, x: Any, variance: Any, squares: Any, kept: Any, start: Any, alpha: Any, zeta: Any, tau: Any
) -> Any:
    """Tests x[start : start + LANES], writes their next variance, and returns two masks of LANES bits.

    The low bits say which are sent, the high bits which are not finite.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floats, ints = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)

        def address(position: int) -> Any:
            data = context.make_array(signature.args[position])(context, builder, args[position]).data
            return builder.bitcast(builder.gep(data, [args[4]]), floats.as_pointer())

        def constant(value: float) -> Any:
            return ir.Constant(floats, [value] * LANES)

        def spread(scalar: Any) -> Any:
            undefined = ir.Constant(floats, ir.Undefined)
            one = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(one, undefined, ir.Constant(ints, [0] * LANES))

        def load(position: int) -> Any:
            return builder.load(address(position), align=4)

        value, zero, largest, times_tau = load(0), constant(0.0), constant(LARGEST), spread(args[7])
        bits = builder.and_(builder.bitcast(value, ints), ir.Constant(ints, [0x7FFFFFFF] * LANES))
        magnitude = builder.bitcast(bits, floats)
        v = builder.fadd(load(1), load(2))
        v = builder.select(builder.fcmp_ordered("<=", v, largest), v, largest)
        bound = builder.fmul(spread(args[5]), v)
        clear = builder.fcmp_ordered(">", builder.fmul(value, value), bound)
        certain = builder.and_(builder.fcmp_ordered("==", bound, zero), builder.fcmp_ordered("!=", value, zero))
        sent = builder.and_(builder.or_(clear, certain), builder.fcmp_ordered(">", magnitude, times_tau))
        left = builder.fsub(v, builder.fmul(constant(2.0), builder.fmul(magnitude, times_tau)))
        left = builder.fadd(left, builder.fmul(times_tau, times_tau))
        left = builder.select(builder.fcmp_ordered(">", left, zero), left, zero)
        all_sent = builder.fcmp_ordered("==", times_tau, zero)
        left = builder.select(all_sent, zero, left)
        builder.store(builder.select(sent, left, builder.fmul(spread(args[6]), v)), address(3), align=4)
        wild = builder.icmp_signed(">=", bits, ir.Constant(ints, [0x7F800000] * LANES))
        word, mask = ir.IntType(64), ir.IntType(LANES)
        low = builder.zext(builder.bitcast(sent, mask), word)
        high = builder.zext(builder.bitcast(wild, mask), word)
        return builder.or_(low, builder.shl(high, ir.Constant(word, LANES)))

    arrays = (x, variance, squares, kept)
    return types.uint64(*arrays, types.intp, types.float32, types.float32, types.float32), generate


@numba.njit(nogil=True, cache=True)
def _unambiguous(
    x: Floats,
    variance: Floats,
    squares: Floats,
    next_variance: Floats,
    indices: Ints,
    alpha: np.float32,
    zeta: np.float32,
    tau: np.float32,
) -> int:
    n, capacity, count = x.size, indices.size, 0
    for start in range(0, n - n % LANES, LANES):
        word = _test_block(x, variance, squares, next_variance, start, alpha, zeta, tau)
        if word >> np.uint64(LANES) != 0:
            return -1
        while word != 0:
            if count < capacity:
                indices[count] = start + _lowest(word)
            count += 1
            word &= word - np.uint64(1)
    for i in range(n - n % LANES, n):
        if not np.isfinite(x[i]):
            return -1
        v = variance[i] + squares[i]
        v = v if v <= _LARGEST else _LARGEST
        bound, magnitude = alpha * v, abs(x[i])
        clear = x[i] * x[i] > bound or (bound == np.float32(0) and x[i] != np.float32(0))
        next_variance[i] = zeta * v
        if clear and magnitude > tau:
            left = (v - np.float32(2) * (magnitude * tau)) + tau * tau
            next_variance[i] = left if left > np.float32(0) and tau != np.float32(0) else np.float32(0)
            if count < capacity:
                indices[count] = i
            count += 1
    return count
