"""Signs as bits, 32 at a time.

Loops that build words bit by bit are not vectorised, so these use LLVM vectors: 32 comparisons give one word, and one
word makes 32 selections.
"""

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types

from tersegrad.kernels.cpu._arrays import Bytes, Ints
from tersegrad.kernels.cpu._intrinsics import intrinsic, pointer, splat
from tersegrad.kernels.ops import LANES

_WORD = ir.IntType(32)
_INTS = ir.VectorType(_WORD, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_SIGNS = ir.Constant(_INTS, [1 << 31] * LANES)


def _chosen(builder: Any, word: Any) -> Any:
    """A vector of one boolean per bit of a word."""
    bits = ir.Constant(_INTS, [1 << lane for lane in range(LANES)])
    masked = builder.and_(splat(builder, word, _INTS), bits)
    return builder.icmp_unsigned("!=", masked, ir.Constant(_INTS, [0] * LANES))


@intrinsic
def pack_32(typing: Any, patterns: Any, at: Any, out: Any, byte: Any) -> Any:
    """Write the signs of ``patterns[at : at + 32]`` to the four bytes from ``out[byte]`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = pointer(context, builder, signature.args[0], args[0], args[1], _INTS)
        minus = builder.icmp_signed("<", builder.load(source, align=4), ir.Constant(_INTS, [0] * LANES))
        target = pointer(context, builder, signature.args[2], args[2], args[3], _WORD)
        builder.store(builder.bitcast(minus, _WORD), target, align=1)
        return context.get_dummy_value()

    return types.void(patterns, types.intp, out, types.intp), generate


@intrinsic
def add_either_32(typing: Any, data: Any, byte: Any, plus: Any, minus: Any, acc: Any, at: Any) -> Any:
    """``acc[at : at + 32] += minus where the bit is set, else plus``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(pointer(context, builder, signature.args[0], args[0], args[1], _WORD), align=1)
        place = pointer(context, builder, signature.args[4], args[4], args[5], _FLOATS)
        either = [splat(builder, number, _FLOATS) for number in (args[3], args[2])]
        terms = builder.select(_chosen(builder, word), *either)
        builder.store(builder.fadd(builder.load(place, align=4), terms), place, align=4)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.float32, types.float32, acc, types.intp), generate


@intrinsic
def add_signed_32(typing: Any, data: Any, byte: Any, values: Any, first: Any, acc: Any, at: Any) -> Any:
    """``acc[at : at + 32] += -values where the bit is set, else values``, the values being those from ``first`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(pointer(context, builder, signature.args[0], args[0], args[1], _WORD), align=1)
        source = pointer(context, builder, signature.args[2], args[2], args[3], _INTS)
        place = pointer(context, builder, signature.args[4], args[4], args[5], _FLOATS)
        flips = builder.select(_chosen(builder, word), _SIGNS, ir.Constant(_INTS, [0] * LANES))
        terms = builder.bitcast(builder.xor(builder.load(source, align=4), flips), _FLOATS)
        builder.store(builder.fadd(builder.load(place, align=4), terms), place, align=4)
        return context.get_dummy_value()

    return types.void(data, types.intp, values, types.intp, acc, types.intp), generate


@numba.njit(nogil=True, cache=True, forceinline=True)
def pack_slice(patterns: Ints, start: int, stop: int, out: Bytes) -> None:
    """Write the signs of ``patterns[start:stop]``; ``start`` is a multiple of 32, and ``stop`` is one or the end."""
    at = start
    while at + LANES <= stop:
        pack_32(patterns, at, out, at // 8)
        at += LANES
    for byte in range(at // 8, (stop + 7) // 8):
        bits = 0
        for i in range(8 * byte, min(8 * byte + 8, stop)):
            bits |= int(patterns[i] < 0) << (i - 8 * byte)
        out[byte] = bits
