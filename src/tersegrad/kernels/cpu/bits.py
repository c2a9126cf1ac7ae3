"""Codes of 1 to 16 bits side by side in bytes, eight at a time (Numba, one core).

What is written is defined in ``kernels.reference.bits``; here is only how. Kernels that make or use codes call
``pack_block`` and ``unpack_block`` themselves, on a block of codes that is still in the nearest cache.

Eight codes are N bytes. Two words of four 16-bit lanes each are folded: neighbouring lanes move together until four
codes are 4 N bits in a row. Both quarters make up to two words, which are stored whole; the next ones overwrite what
is too much.
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.reference.bits import check_packed, packed_nbytes

__all__ = ["BLOCK", "SLACK", "pack_bits", "pack_block", "packed_nbytes", "unpack_bits", "unpack_block"]

Bytes = NDArray[np.uint8]
AnyCodes = NDArray[Any]
Words = NDArray[np.uint64]

BLOCK = 512  # codes packed at a time
SLACK = 16  # bytes behind a block that are written, or read, and mean nothing

# Numba makes a float of a sum of int64 and uint64, and tests an index that might be negative.
u64: Any = np.uint64
PAIRS = np.uint64(0x0000FFFF0000FFFF)  # every other lane of 16 bits
QUADS = np.uint64(0x00000000FFFFFFFF)  # every other lane of 32 bits


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write the lowest ``bits`` bits of each code (uint8 or int32) to ``out``, which has exactly their bytes."""
    check_packed(codes, bits, out)
    _pack(_array(codes), bits, _array(out))


def unpack_bits(data: Tensor, bits: int, codes: Tensor) -> None:
    """Read ``len(codes)`` codes (uint8 or int32) from ``data``, which has exactly their bytes."""
    check_packed(codes, bits, data)
    _unpack(_array(data), bits, _array(codes))


def _array(tensor: Tensor) -> NDArray[Any]:
    """The memory of a tensor, not a copy of it."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        seen = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        raise TypeError(f"a CPU kernel takes contiguous 1-D tensors on cpu, got {seen}")
    return tensor.detach().numpy()


# --- blocks; machine code of those who call them is cached with these inside: after a change here, touch their files


@numba.njit(nogil=True, cache=True, forceinline=True)
def pack_block(words: Words, bits: int, out: Bytes, at: int) -> None:
    """Pack BLOCK codes to ``out[at:]`` and spoil them; ``words`` views them as lanes of 16 bits.

    No lane has a bit set above the lowest ``bits``. Up to SLACK bytes behind the block are overwritten.
    """
    to_pair, to_quad, to_eight = u64(16 - bits), u64(32 - 2 * bits), u64(4 * bits - 1)
    for i in range(words.size):
        pairs = (words[i] & PAIRS) | ((words[i] & ~PAIRS) >> to_pair)
        words[i] = (pairs & QUADS) | ((pairs & ~QUADS) >> to_quad)
    for group in range(words.size // 2):
        low, high = words[2 * group], words[2 * group + 1]
        place = u64(at) + u64(group) * u64(bits)
        _store(out, place, low | ((high << to_eight) << u64(1)))  # in two steps: 64 is not a legal shift
        if bits > 8:
            _store(out, place + u64(8), high >> u64(64 - 4 * bits))


@numba.njit(nogil=True, cache=True, forceinline=True)
def unpack_block(data: Bytes, at: int, bits: int, words: Words) -> None:
    """Unpack BLOCK codes from ``data[at:]``; ``words`` views them as lanes of 16 bits.

    Up to SLACK bytes behind the block are read.
    """
    to_pair, to_quad, to_eight = u64(16 - bits), u64(32 - 2 * bits), u64(4 * bits - 1)
    for group in range(words.size // 2):
        place = u64(at) + u64(group) * u64(bits)
        low = _load(data, place)
        high = (low >> to_eight) >> u64(1)
        if bits > 8:
            high |= _load(data, place + u64(8)) << u64(64 - 4 * bits)
        words[2 * group], words[2 * group + 1] = low, high
    two = (u64(1) << u64(2 * bits)) - u64(1)
    one = (u64(1) << u64(bits)) - u64(1)
    one |= one << u64(32)  # in both halves of a word
    for i in range(words.size):
        pairs = (words[i] & two) | ((words[i] & (two << u64(2 * bits))) << to_quad)
        words[i] = (pairs & one) | ((pairs & (one << u64(bits))) << to_pair)


@numba.njit(nogil=True, cache=True, forceinline=True)
def _store(out: Bytes, at: Any, word: Any) -> None:
    for i in range(8):  # becomes one instruction on little-endian machines
        out[at + u64(i)] = (word >> u64(8 * i)) & u64(255)


@numba.njit(nogil=True, cache=True, forceinline=True)
def _load(data: Bytes, at: Any) -> Any:
    word = u64(0)
    for i in range(8):  # becomes one instruction on little-endian machines
        word |= u64(data[at + u64(i)]) << u64(8 * i)
    return word


# --- whole vectors


@numba.njit(nogil=True, cache=True)
def _pack(codes: AnyCodes, bits: int, out: Bytes) -> None:
    n, nbytes, block_nbytes, mask = codes.size, out.size, BLOCK * bits // 8, np.uint16((1 << bits) - 1)
    lanes = np.zeros(BLOCK, np.uint16)
    words = lanes.view(np.uint64)
    last = np.empty(block_nbytes + SLACK, np.uint8)
    for start in range(0, n, BLOCK):
        block, place = codes[start : start + BLOCK], start // 8 * bits
        for i in range(block.size):
            lanes[i] = np.uint16(block[i]) & mask
        if place + block_nbytes + SLACK <= nbytes:
            pack_block(words, bits, out, place)
        else:  # at the end there is no room for more than what is meant
            lanes[block.size :] = 0
            pack_block(words, bits, last, 0)
            rest = out[place : place + block_nbytes]
            rest[:] = last[: rest.size]


@numba.njit(nogil=True, cache=True)
def _unpack(data: Bytes, bits: int, codes: AnyCodes) -> None:
    n, nbytes, block_nbytes = codes.size, data.size, BLOCK * bits // 8
    lanes = np.empty(BLOCK, np.uint16)
    words = lanes.view(np.uint64)
    last = np.zeros(block_nbytes + SLACK, np.uint8)
    for start in range(0, n, BLOCK):
        block, place = codes[start : start + BLOCK], start // 8 * bits
        if place + block_nbytes + SLACK <= nbytes:
            unpack_block(data, place, bits, words)
        else:  # at the end there is nothing more to read
            rest = data[place : place + block_nbytes]
            last[: rest.size] = rest
            unpack_block(last, 0, bits, words)
        for i in range(block.size):
            block[i] = lanes[i]
