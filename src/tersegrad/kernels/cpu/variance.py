"""Which elements are unambiguous (VGC): one pass that reads three vectors, writes one, and collects positions."""

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Floats, Ints, array
from tersegrad.kernels.cpu._intrinsics import intrinsic, lowest, pointer, splat
from tersegrad.kernels.ops import ABS_MASK, FLOAT32_MAX, INF_BITS, check_variance

__all__ = ["unambiguous"]

LANES = 32  # elements tested at once: two masks of this many bits fill a machine word
LARGEST = np.float32(FLOAT32_MAX)


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
    arrays = array(x), array(variance), array(squares), array(next_variance)
    return int(_unambiguous(*arrays, array(indices, torch.int32), *constants))


# --- the test of a block, in LLVM IR: a loop over four arrays that might overlap is not vectorised


@intrinsic
def _test_block(
    typing: Any, x: Any, variance: Any, squares: Any, kept: Any, start: Any, alpha: Any, zeta: Any, tau: Any
) -> Any:
    """Test x[start : start + LANES], write their next variance, and return two masks of LANES bits.

    The low bits say which are sent, the high bits which are non-finite.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floats, ints = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.IntType(32), LANES)

        def address(place: int) -> Any:
            return pointer(context, builder, signature.args[place], args[place], args[4], floats)

        def constant(value: float) -> Any:
            return ir.Constant(floats, [value] * LANES)

        def load(place: int) -> Any:
            return builder.load(address(place), align=4)

        value, zero, largest, times_tau = load(0), constant(0.0), constant(FLOAT32_MAX), splat(builder, args[7], floats)
        bits = builder.and_(builder.bitcast(value, ints), ir.Constant(ints, [ABS_MASK] * LANES))
        magnitude = builder.bitcast(bits, floats)
        v = builder.fadd(load(1), load(2))
        v = builder.select(builder.fcmp_ordered("<=", v, largest), v, largest)
        bound = builder.fmul(splat(builder, args[5], floats), v)
        clear = builder.fcmp_ordered(">", builder.fmul(value, value), bound)
        certain = builder.and_(builder.fcmp_ordered("==", bound, zero), builder.fcmp_ordered("!=", value, zero))
        sent = builder.and_(builder.or_(clear, certain), builder.fcmp_ordered(">", magnitude, times_tau))
        left = builder.fsub(v, builder.fmul(constant(2.0), builder.fmul(magnitude, times_tau)))
        left = builder.fadd(left, builder.fmul(times_tau, times_tau))
        left = builder.select(builder.fcmp_ordered(">", left, zero), left, zero)
        all_sent = builder.fcmp_ordered("==", times_tau, zero)
        left = builder.select(all_sent, zero, left)
        builder.store(builder.select(sent, left, builder.fmul(splat(builder, args[6], floats), v)), address(3), align=4)
        wild = builder.icmp_signed(">=", bits, ir.Constant(ints, [INF_BITS] * LANES))
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
                indices[count] = start + lowest(word)
            count += 1
            word &= word - np.uint64(1)
    for i in range(n - n % LANES, n):
        if not np.isfinite(x[i]):
            return -1
        v = variance[i] + squares[i]
        v = v if v <= LARGEST else LARGEST
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
