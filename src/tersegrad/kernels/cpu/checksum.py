"""XXH64 at memory bandwidth (Numba), as defined in ``kernels.reference.checksum``."""

import numba
import numpy as np
import torch
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Bytes, array
from tersegrad.kernels.ops import STRIPE, XXH_PRIMES, check_bytes

__all__ = ["xxh64"]

PRIME_1, PRIME_2, PRIME_3, PRIME_4, PRIME_5 = map(np.uint64, XXH_PRIMES)


def xxh64(data: Tensor, seed: int = 0) -> int:
    """The XXH64 checksum of a one-dimensional, contiguous uint8 tensor, in [0, 2^64)."""
    check_bytes(data, seed)
    return int(_xxh64(array(data, torch.uint8), np.uint64(seed)))


@numba.njit(nogil=True, cache=True)
def _xxh64(data: Bytes, seed: np.uint64) -> np.uint64:
    n = data.size
    total = _stripes(data, seed) if n >= STRIPE else seed + PRIME_5
    return _avalanche(_rest(data, n - n % STRIPE, total + np.uint64(n)))


@numba.njit(nogil=True, cache=True)
def _stripes(data: Bytes, seed: np.uint64) -> np.uint64:
    a, b, c, d = seed + PRIME_1 + PRIME_2, seed + PRIME_2, seed, seed - PRIME_1
    for stripe in range(data.size // STRIPE):
        start = stripe * STRIPE  # provably not negative: otherwise the bytes of a word are loaded one by one
        a = _round(a, _word(data, start))
        b = _round(b, _word(data, start + 8))
        c = _round(c, _word(data, start + 16))
        d = _round(d, _word(data, start + 24))
    total = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
    for lane in (a, b, c, d):
        total = (total ^ _round(np.uint64(0), lane)) * PRIME_1 + PRIME_4
    return total


@numba.njit(nogil=True, cache=True)
def _rest(data: Bytes, start: int, total: np.uint64) -> np.uint64:
    while start + 8 <= data.size:
        total = _rotate(total ^ _round(np.uint64(0), _word(data, start)), 27) * PRIME_1 + PRIME_4
        start += 8
    if start + 4 <= data.size:
        total = _rotate(total ^ (_half_word(data, start) * PRIME_1), 23) * PRIME_2 + PRIME_3
        start += 4
    for i in range(start, data.size):
        total = _rotate(total ^ (np.uint64(data[i]) * PRIME_5), 11) * PRIME_1
    return total


@numba.njit(nogil=True, cache=True)
def _avalanche(total: np.uint64) -> np.uint64:
    total = (total ^ (total >> np.uint64(33))) * PRIME_2
    total = (total ^ (total >> np.uint64(29))) * PRIME_3
    return total ^ (total >> np.uint64(32))


@numba.njit(nogil=True, cache=True)
def _word(data: Bytes, start: int) -> np.uint64:
    return _half_word(data, start) | (_half_word(data, start + 4) << np.uint64(32))


@numba.njit(nogil=True, cache=True)
def _half_word(data: Bytes, start: int) -> np.uint64:
    # Byte by byte, so that neither alignment nor the machine's byte order matters; it compiles to one load.
    low = np.uint64(data[start]) | (np.uint64(data[start + 1]) << np.uint64(8))
    high = np.uint64(data[start + 2]) | (np.uint64(data[start + 3]) << np.uint64(8))
    return low | (high << np.uint64(16))


@numba.njit(nogil=True, cache=True)
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(lane + word * PRIME_2, 31) * PRIME_1


@numba.njit(nogil=True, cache=True)
def _rotate(word: np.uint64, by: int) -> np.uint64:
    return (word << np.uint64(by)) | (word >> np.uint64(64 - by))
