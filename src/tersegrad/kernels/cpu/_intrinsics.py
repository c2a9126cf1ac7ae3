"""Single instructions and vector operations, generated as LLVM IR."""

from typing import Any

import numba.extending
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from tersegrad.kernels.ops import ABS_MASK

intrinsic: Any = numba.extending.intrinsic  # untyped: with Numba's types, callers would have to pass ``typing``

WORD = 64  # elements compared at once, one bit each of a machine word


# --- building blocks of intrinsics


def pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any, to: Any) -> Any:
    """The address of element ``at`` of an array, as a pointer to the type ``to``."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), to.as_pointer())


def splat(builder: Any, scalar: Any, kind: Any) -> Any:
    """A vector with the same scalar in all lanes."""
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, undefined, lanes)


def reaching(builder: Any, patterns: Any, low: Any) -> Any:
    """A word of WORD bits; bit j is set if the magnitude of pattern j is at least ``low``."""
    vector = ir.VectorType(ir.IntType(32), WORD)
    magnitudes = builder.and_(patterns, ir.Constant(vector, [ABS_MASK] * WORD))
    return builder.bitcast(builder.icmp_signed(">=", magnitudes, splat(builder, low, vector)), ir.IntType(WORD))


# --- for kernels


@intrinsic
def hits(typing: Any, bits: Any, start: Any, low: Any) -> Any:
    """A word whose bit j is set if ``bits[start + j] & ABS_MASK >= low``, for 0 <= j < WORD.

    A loop that builds this word is vectorised badly; as one comparison of a 64-element vector it becomes
    compare, pack and move-mask instructions on AVX2, and mask registers on AVX-512.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(32), WORD)
        address = pointer(context, builder, signature.args[0], args[0], args[1], vector)
        return reaching(builder, builder.load(address, align=4), args[2])

    return types.uint64(bits, types.intp, types.int32), generate


@intrinsic
def lowest(typing: Any, word: Any) -> Any:
    """The number of the lowest set bit of a word that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.intp(types.uint64), generate


@intrinsic
def trailing_zeros(typing: Any, word: Any) -> Any:
    """Number of zero bits below the lowest set bit; 64 for 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def leading_zeros(typing: Any, word: Any) -> Any:
    """Number of zero bits above the highest set bit; 64 for 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def ones(typing: Any, word: Any) -> Any:
    """Number of set bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@intrinsic
def pattern_of(typing: Any, number: Any) -> Any:
    """The bit pattern of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def whole(typing: Any, number: Any) -> Any:
    """A whole float32 as int32. Numba would go through int64, which does not vectorise."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fptosi(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def float_pattern(typing: Any, number: Any) -> Any:
    """The bit pattern of the float32 nearest to an integer below 2**31."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.sitofp(args[0], ir.FloatType()), ir.IntType(32))

    return types.uint32(types.uint32), generate


@intrinsic
def shift_right(typing: Any, word: Any, by: Any) -> Any:
    """Logical ``word >> by`` on 32 bits; Numba would widen a shift by a variable to 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.lshr(args[0], args[1])

    return types.int32(types.int32, types.int32), generate


@intrinsic
def shift_left(typing: Any, word: Any, by: Any) -> Any:
    """``word << by`` on 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shl(args[0], args[1])

    return types.int32(types.int32, types.int32), generate
