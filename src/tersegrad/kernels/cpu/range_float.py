"""Floats of N bits with an offset, coded and packed in one pass over memory (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.range_float``; here is only how.
"""

from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from numba.core import types
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu.bits import BLOCK, SLACK, pack_block, unpack_block
from tersegrad.kernels.reference.range_float import Layout, check_range, float_of

__all__ = ["abs_max", "range_decode_add", "range_encode"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

ABS_MASK = np.int32(0x7FFFFFFF)  # everything but the sign
SIGN = np.int32(-0x80000000)
INF_BITS = np.int32(0x7F800000)  # |x| has these bits or more <=> x is infinite or NaN
i32: Any = np.int32  # around every operation: Numba widens to 64 bits otherwise, which halves the vectors


def abs_max(x: Tensor) -> float:
    """The largest ``|x|``, 0 if there is none; infinite or NaN if and only if an element of ``x`` is."""
    return float_of(int(_abs_max(_array(x, torch.float32).view(np.int32))))


def range_encode(x: Tensor, layout: Layout, nearest: bool, out: Tensor) -> bool:
    """Write the packed codes of ``x`` to ``out``, which has exactly their bytes; False if an ``x`` is not finite."""
    check_range(x.numel(), layout, out)
    largest = _encode(
        _array(x, torch.float32).view(np.int32),
        layout.bits,
        i32(layout.shift),
        i32(layout.half(nearest)),
        i32(layout.base - 1),
        i32(layout.first(nearest)),
        i32(layout.positives),
        i32(layout.negatives),
        _array(out, torch.uint8),
    )
    return bool(largest < INF_BITS)


def range_decode_add(data: Tensor, layout: Layout, acc: Tensor, scale: float) -> None:
    """``acc += scale * decoded(data)``, the product rounded to float32 before it is added."""
    check_range(acc.numel(), layout, data)
    _decode_add(
        _array(data, torch.uint8),
        layout.bits,
        i32(layout.shift),
        i32(layout.base - 1),
        i32(layout.positives),
        i32(layout.negatives),
        _array(acc, torch.float32),
        np.float32(scale),
    )


def _array(tensor: Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """The memory of a tensor, not a copy of it; the kernels trust what is checked here."""
    plain = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.dtype != dtype or not plain:
        seen = f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        raise TypeError(f"a CPU kernel takes contiguous 1-D {dtype} on cpu, got {seen}")
    return tensor.detach().numpy()


_intrinsic: Any = numba.extending.intrinsic  # as Numba types it, callers would have to pass ``typing``


@_intrinsic
def _shift_right(typing: Any, word: Any, by: Any) -> Any:
    """``word >> by`` on 32 bits, zeros coming in: by a number that is not constant, Numba shifts 64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.lshr(args[0], args[1])

    return types.int32(types.int32, types.int32), generate


@_intrinsic
def _shift_left(typing: Any, word: Any, by: Any) -> Any:
    """``word << by`` on 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shl(args[0], args[1])

    return types.int32(types.int32, types.int32), generate


@numba.njit(nogil=True, cache=True)
def _abs_max(patterns: Ints) -> np.int32:
    largest = i32(0)
    for i in range(patterns.size):
        largest = max(largest, i32(patterns[i] & ABS_MASK))
    return largest


@numba.njit(nogil=True, cache=True)
def _encode(
    patterns: Ints,
    bits: int,
    shift: np.int32,
    half: np.int32,
    below: np.int32,
    first: np.int32,
    positives: np.int32,
    negatives: np.int32,
    out: Bytes,
) -> np.int32:
    n, nbytes, block_nbytes = patterns.size, out.size, BLOCK * bits // 8
    lanes = np.zeros(BLOCK, np.uint16)
    words = lanes.view(np.uint64)
    last = np.empty(block_nbytes + SLACK, np.uint8)
    largest = i32(0)
    for start in range(0, n, BLOCK):
        block, place = patterns[start : start + BLOCK], start // 8 * bits
        for i in range(block.size):
            pattern = block[i]
            magnitude = i32(pattern & ABS_MASK)
            largest = max(largest, magnitude)
            negative = i32(pattern >> i32(31))  # all ones, or zero
            most = i32(positives + i32(negative & i32(negatives - positives)))
            step = i32(_shift_right(i32(magnitude + half), shift) - below)
            step = min(max(step, i32(1)), most)
            code = i32(step + i32(negative & positives))
            lanes[i] = np.uint16(code if magnitude >= first and step > 0 else i32(0))
        if place + block_nbytes + SLACK <= nbytes:
            pack_block(words, bits, out, place)
        else:  # at the end there is no room for more than what is meant
            lanes[block.size :] = 0
            pack_block(words, bits, last, 0)
            rest = out[place : place + block_nbytes]
            rest[:] = last[: rest.size]
    return largest


@numba.njit(nogil=True, cache=True)
def _decode_add(
    data: Bytes,
    bits: int,
    shift: np.int32,
    below: np.int32,
    positives: np.int32,
    negatives: np.int32,
    acc: Floats,
    scale: np.float32,
) -> None:
    n, nbytes, block_nbytes = acc.size, data.size, BLOCK * bits // 8
    lanes = np.empty(BLOCK, np.uint16)
    words = lanes.view(np.uint64)
    last = np.zeros(block_nbytes + SLACK, np.uint8)
    patterns = np.empty(BLOCK, np.int32)
    values = patterns.view(np.float32)
    most = i32(positives + negatives)
    for start in range(0, n, BLOCK):
        block, place = acc[start : start + BLOCK], start // 8 * bits
        if place + block_nbytes + SLACK <= nbytes:
            unpack_block(data, place, bits, words)
        else:  # at the end there is nothing more to read
            rest = data[place : place + block_nbytes]
            last[: rest.size] = rest
            unpack_block(last, 0, bits, words)
        for i in range(BLOCK):
            code = min(i32(lanes[i]), most)
            negative = code > positives
            step = i32(code - positives) if negative else code
            magnitude = _shift_left(i32(step + below), shift)
            signed = i32(magnitude | SIGN) if negative else magnitude
            patterns[i] = signed if code > 0 else i32(0)
        for i in range(block.size):
            block[i] += scale * values[i]
