"""Packing blocks of codes of 1 to 16 bits, eight at a time, for kernels that make or use codes in the L1 cache.

The format is defined in ``kernels.reference.bits``. Eight codes of N bits are N bytes. They come as two words of four
16-bit lanes; in each word neighbouring lanes are merged until its four codes are 4 N adjacent bits. The two results
fill up to two words, which are stored whole; the next stores overwrite the excess bytes.
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from tersegrad.kernels.cpu._arrays import Bytes, u64

Words = NDArray[np.uint64]

CODES = 512  # packed at a time
SLACK = 16  # bytes after a block that are written or read, and have no meaning

# u64 everywhere: Numba turns int64 + uint64 into a float, and checks the sign of signed indices.
PAIRS = np.uint64(0x0000FFFF0000FFFF)  # every other lane of 16 bits
QUADS = np.uint64(0x00000000FFFFFFFF)  # every other lane of 32 bits


@numba.njit(nogil=True, cache=True, forceinline=True)
def pack_block(words: Words, bits: int, out: Bytes, at: int) -> None:
    """Pack CODES codes to ``out[at:]``, overwriting ``words``, which views them as lanes of 16 bits.

    Only the lowest ``bits`` bits of a lane may be set. Up to SLACK bytes after the block are overwritten.
    """
    to_pair, to_quad, to_eight = u64(16 - bits), u64(32 - 2 * bits), u64(4 * bits - 1)
    for i in range(words.size):
        pairs = (words[i] & PAIRS) | ((words[i] & ~PAIRS) >> to_pair)
        words[i] = (pairs & QUADS) | ((pairs & ~QUADS) >> to_quad)
    for group in range(words.size // 2):
        low, high = words[2 * group], words[2 * group + 1]
        place = u64(at) + u64(group) * u64(bits)
        store_word(out, place, low | ((high << to_eight) << u64(1)))  # in two steps: 64 is not a legal shift
        if bits > 8:
            store_word(out, place + u64(8), high >> u64(64 - 4 * bits))


@numba.njit(nogil=True, cache=True, forceinline=True)
def unpack_block(data: Bytes, at: int, bits: int, words: Words) -> None:
    """Unpack CODES codes from ``data[at:]``; ``words`` views them as lanes of 16 bits.

    Up to SLACK bytes after the block are read.
    """
    to_pair, to_quad, to_eight = u64(16 - bits), u64(32 - 2 * bits), u64(4 * bits - 1)
    for group in range(words.size // 2):
        place = u64(at) + u64(group) * u64(bits)
        low = load_word(data, place)
        high = (low >> to_eight) >> u64(1)
        if bits > 8:
            high |= load_word(data, place + u64(8)) << u64(64 - 4 * bits)
        words[2 * group], words[2 * group + 1] = low, high
    two = (u64(1) << u64(2 * bits)) - u64(1)
    one = (u64(1) << u64(bits)) - u64(1)
    one |= one << u64(32)  # in both halves of a word
    for i in range(words.size):
        pairs = (words[i] & two) | ((words[i] & (two << u64(2 * bits))) << to_quad)
        words[i] = (pairs & one) | ((pairs & (one << u64(bits))) << to_pair)


@numba.njit(nogil=True, cache=True, forceinline=True)
def store_word(out: Bytes, at: Any, word: Any) -> None:
    for i in range(8):  # becomes one instruction on little-endian machines
        out[u64(at) + u64(i)] = (word >> u64(8 * i)) & u64(255)


@numba.njit(nogil=True, cache=True, forceinline=True)
def load_word(data: Bytes, at: Any) -> Any:
    word = u64(0)
    for i in range(8):  # becomes one instruction on little-endian machines
        word |= u64(data[u64(at) + u64(i)]) << u64(8 * i)
    return word
