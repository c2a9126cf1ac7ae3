"""Codes of 1 to 16 bits, packed into bytes (Numba, one core).

The format is defined in ``kernels.reference.bits``; ``_packing`` has the inner loops.
"""

from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Bytes, array
from tersegrad.kernels.cpu._packing import CODES, SLACK, pack_block, unpack_block
from tersegrad.kernels.ops import check_packed, packed_nbytes

__all__ = ["pack_bits", "packed_nbytes", "unpack_bits"]

AnyCodes = NDArray[Any]


def pack_bits(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write the lowest ``bits`` bits of each code (uint8 or int32) to ``out``, which has exactly that many bytes."""
    check_packed(codes, bits, out)
    _pack(array(codes, None), bits, array(out, torch.uint8))


def unpack_bits(data: Tensor, bits: int, codes: Tensor) -> None:
    """Read ``len(codes)`` codes (uint8 or int32) from ``data``, which has exactly as many bytes as they take."""
    check_packed(codes, bits, data)
    _unpack(array(data, torch.uint8), bits, array(codes, None))


@numba.njit(nogil=True, cache=True)
def _pack(codes: AnyCodes, bits: int, out: Bytes) -> None:
    n, nbytes, block_nbytes, mask = codes.size, out.size, CODES * bits // 8, np.uint16((1 << bits) - 1)
    lanes = np.zeros(CODES, np.uint16)
    words = lanes.view(np.uint64)
    last = np.empty(block_nbytes + SLACK, np.uint8)
    for start in range(0, n, CODES):
        block, place = codes[start : start + CODES], start // 8 * bits
        for i in range(block.size):
            lanes[i] = np.uint16(block[i]) & mask
        if place + block_nbytes + SLACK <= nbytes:
            pack_block(words, bits, out, place)
        else:  # at the end, SLACK bytes more would be out of bounds
            lanes[block.size :] = 0
            pack_block(words, bits, last, 0)
            rest = out[place : place + block_nbytes]
            rest[:] = last[: rest.size]


@numba.njit(nogil=True, cache=True)
def _unpack(data: Bytes, bits: int, codes: AnyCodes) -> None:
    n, nbytes, block_nbytes = codes.size, data.size, CODES * bits // 8
    lanes = np.empty(CODES, np.uint16)
    words = lanes.view(np.uint64)
    last = np.zeros(block_nbytes + SLACK, np.uint8)
    for start in range(0, n, CODES):
        block, place = codes[start : start + CODES], start // 8 * bits
        if place + block_nbytes + SLACK <= nbytes:
            unpack_block(data, place, bits, words)
        else:  # at the end, SLACK bytes more would be out of bounds
            rest = data[place : place + block_nbytes]
            last[: rest.size] = rest
            unpack_block(last, 0, bits, words)
        for i in range(block.size):
            block[i] = lanes[i]
