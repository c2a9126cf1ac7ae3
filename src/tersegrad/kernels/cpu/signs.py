"""Signs as bits, 32 at a time, and means of groups, in one pass over memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.signs``; here is only how. Loops that
build words bit by bit do not become vectors, so that is written in LLVM's own vectors: 32 comparisons are one word, and
a word is 32 choices. ``natural`` uses them too.
"""

from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu.qsgd import _array, _uniform
from tersegrad.kernels.reference.qsgd import UNIFORM_BITS, split_key
from tersegrad.kernels.reference.signs import LANES, check_groups, check_signs

__all__ = ["break_ties", "one_bit_encode", "scaled_sign_encode", "signs_decode_add"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

# Around every operation: Numba widens to 64 bits otherwise, which halves the vectors.
i32: Any = np.int32
u32: Any = np.uint32
f32: Any = np.float32

BLOCK = 1024  # elements that are summed and then looked at again while they are in the nearest cache
HALF = np.int32(1 << UNIFORM_BITS - 1)


def scaled_sign_encode(x: Tensor, bucket: int, means: Tensor, out: Tensor) -> bool:
    """Write each group's mean of ``|x|``, and all signs to ``out``; False if an ``x`` is not finite."""
    check_groups(x.numel(), bucket, means.numel())
    check_signs(x.numel(), out)
    vector, found = _array(x, torch.float32), _array(means, torch.float32)
    return bool(_scaled_sign(vector, vector.view(np.int32), bucket, found, _array(out, torch.uint8)))


def one_bit_encode(x: Tensor, bucket: int, means: Tensor, out: Tensor) -> bool:
    """Write each group's means of either sign, and all signs to ``out``; False if an ``x`` is not finite."""
    check_groups(x.numel(), bucket, means.numel() / 2)
    check_signs(x.numel(), out)
    vector, found = _array(x, torch.float32), _array(means, torch.float32)
    return bool(_one_bit(vector, vector.view(np.int32), bucket, found, _array(out, torch.uint8)))


def signs_decode_add(data: Tensor, values: Tensor, bucket: int, acc: Tensor, scale: float) -> None:
    """``acc += scale * value``, the product rounded to float32."""
    check_groups(acc.numel(), bucket, values.numel() / 2)
    check_signs(acc.numel(), data)
    total = _array(acc, torch.float32)
    _decode_add(_array(data, torch.uint8), _array(values, torch.float32), bucket, total, f32(scale))


def break_ties(votes: Tensor, key: int) -> None:
    """Every zero becomes +1 or -1, as the highest bit of the hash of the key and the position says."""
    low, high = (u32(half) for half in split_key(key))
    _break_ties(_array(votes, torch.float32), low, high)


# --- 32 at a time

_intrinsic: Any = numba.extending.intrinsic  # as Numba types it, callers would have to pass ``typing``
_WORD = ir.IntType(32)
_INTS = ir.VectorType(_WORD, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_SIGNS = ir.Constant(_INTS, [1 << 31] * LANES)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any, to: Any) -> Any:
    """Where element ``at`` of an array lies, as a pointer to what shall be read or written there."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), to.as_pointer())


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    """A vector with the same number in all lanes."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_WORD, 0))
    lanes = ir.Constant(_INTS, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), lanes)


def _chosen(builder: Any, word: Any) -> Any:
    """A truth for each bit of a word."""
    bits = ir.Constant(_INTS, [1 << lane for lane in range(LANES)])
    masked = builder.and_(_splat(builder, word, _INTS), bits)
    return builder.icmp_unsigned("!=", masked, ir.Constant(_INTS, [0] * LANES))


@_intrinsic
def pack_32(typing: Any, patterns: Any, at: Any, out: Any, byte: Any) -> Any:
    """Write the signs of ``patterns[at : at + 32]`` to the four bytes from ``out[byte]`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = _pointer(context, builder, signature.args[0], args[0], args[1], _INTS)
        minus = builder.icmp_signed("<", builder.load(source, align=4), ir.Constant(_INTS, [0] * LANES))
        target = _pointer(context, builder, signature.args[2], args[2], args[3], _WORD)
        builder.store(builder.bitcast(minus, _WORD), target, align=1)
        return context.get_dummy_value()

    return types.void(patterns, types.intp, out, types.intp), generate


@_intrinsic
def add_either_32(typing: Any, data: Any, byte: Any, plus: Any, minus: Any, acc: Any, at: Any) -> Any:
    """``acc[at : at + 32] += minus where the bit is set, else plus``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], _WORD), align=1)
        place = _pointer(context, builder, signature.args[4], args[4], args[5], _FLOATS)
        either = [_splat(builder, number, _FLOATS) for number in (args[3], args[2])]
        terms = builder.select(_chosen(builder, word), *either)
        builder.store(builder.fadd(builder.load(place, align=4), terms), place, align=4)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.float32, types.float32, acc, types.intp), generate


@_intrinsic
def add_signed_32(typing: Any, data: Any, byte: Any, values: Any, first: Any, acc: Any, at: Any) -> Any:
    """``acc[at : at + 32] += -values where the bit is set, else values``, the values being those from ``first`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(_pointer(context, builder, signature.args[0], args[0], args[1], _WORD), align=1)
        source = _pointer(context, builder, signature.args[2], args[2], args[3], _INTS)
        place = _pointer(context, builder, signature.args[4], args[4], args[5], _FLOATS)
        flips = builder.select(_chosen(builder, word), _SIGNS, ir.Constant(_INTS, [0] * LANES))
        terms = builder.bitcast(builder.xor(builder.load(source, align=4), flips), _FLOATS)
        builder.store(builder.fadd(builder.load(place, align=4), terms), place, align=4)
        return context.get_dummy_value()

    return types.void(data, types.intp, values, types.intp, acc, types.intp), generate


@numba.njit(nogil=True, cache=True, forceinline=True)
def pack_stretch(patterns: Ints, start: int, stop: int, out: Bytes) -> None:
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


# --- whole vectors


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def _scaled_sign(x: Floats, patterns: Ints, bucket: int, means: Floats, out: Bytes) -> bool:
    n, everything = x.size, 0.0
    for g in range(means.size):
        first, end, total = g * bucket, min((g + 1) * bucket, n), 0.0
        for start in range(first, end, BLOCK):
            stop = min(start + BLOCK, end)
            part = x[start:stop]
            for i in range(part.size):
                total += np.float64(abs(part[i]))
            pack_stretch(patterns, start, stop, out)
        everything += total
        means[g] = f32(total / (end - first))
    return bool(everything < np.inf)  # a sum of magnitudes of float32 is finite in float64; NaN is below nothing


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def _one_bit(x: Floats, patterns: Ints, bucket: int, means: Floats, out: Bytes) -> bool:
    n, everything = x.size, 0.0
    for g in range(means.size // 2):
        first, end, plus, minus, negatives = g * bucket, min((g + 1) * bucket, n), 0.0, 0.0, 0
        for start in range(first, end, BLOCK):
            stop = min(start + BLOCK, end)
            part, signs = x[start:stop], patterns[start:stop]
            for i in range(part.size):
                plus += np.float64(part[i]) if signs[i] >= 0 else 0.0
                minus += np.float64(part[i]) if signs[i] < 0 else 0.0
            count = i32(0)
            for i in range(signs.size):
                count = i32(count + i32(signs[i] < 0))
            negatives += int(count)
            pack_stretch(patterns, start, stop, out)
        everything += plus - minus
        positives = end - first - negatives
        means[2 * g] = f32(plus / positives) if positives > 0 else f32(0)
        means[2 * g + 1] = f32(minus / negatives) if negatives > 0 else f32(0)
    return bool(everything < np.inf)


@numba.njit(nogil=True, cache=True)
def _decode_add(data: Bytes, values: Floats, bucket: int, acc: Floats, scale: np.float32) -> None:
    n = acc.size
    for g in range(values.size // 2):
        at, end = g * bucket, min((g + 1) * bucket, n)
        plus, minus = f32(scale * values[2 * g]), f32(scale * values[2 * g + 1])
        while at + LANES <= end:
            add_either_32(data, at // 8, plus, minus, acc, at)
            at += LANES
        for i in range(at, end):
            acc[i] += minus if (data[i // 8] >> (i % 8)) & 1 else plus


@numba.njit(nogil=True, cache=True)
def _break_ties(votes: Floats, low: np.uint32, high: np.uint32) -> None:
    for i in range(votes.size):
        coin = f32(1) if _uniform(u32(i), low, high) >= HALF else f32(-1)
        votes[i] = coin if votes[i] == f32(0) else votes[i]
