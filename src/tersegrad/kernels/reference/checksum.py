"""XXH64, a fast 64-bit checksum, in plain Python integers: the definition the fast kernel must meet.

XXH64 (https://github.com/Cyan4973/xxHash) detects accidental corruption, not forgery. Each of four lanes takes every
fourth 8-byte word of the input; then they are merged, the rest of the input is mixed in, and the bits are mixed once
more. All arithmetic is modulo 2^64, all words are little-endian.
"""

from torch import Tensor

from tersegrad.kernels.ops import STRIPE, XXH_PRIMES, check_bytes

__all__ = ["xxh64"]

PRIME_1, PRIME_2, PRIME_3, PRIME_4, PRIME_5 = XXH_PRIMES
_WORD = (1 << 64) - 1


def xxh64(data: Tensor, seed: int = 0) -> int:
    """The XXH64 checksum of a one-dimensional uint8 tensor, in [0, 2^64).

    >>> import torch
    >>> hex(xxh64(torch.tensor(list(b"abc"), dtype=torch.uint8)))
    '0x44bc2cf5ad770999'
    """
    check_bytes(data, seed)
    text = data.cpu().numpy().tobytes()
    stripes = len(text) - len(text) % STRIPE
    total = _stripes(text[:stripes], seed) if stripes else seed + PRIME_5
    return _avalanche(_rest(text[stripes:], (total + len(text)) & _WORD))


def _stripes(text: bytes, seed: int) -> int:
    lanes = [seed + PRIME_1 + PRIME_2, seed + PRIME_2, seed, seed - PRIME_1]
    for start in range(0, len(text), 8):
        lane = start // 8 % 4
        lanes[lane] = _round(lanes[lane], int.from_bytes(text[start : start + 8], "little"))
    total = sum(_rotate(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
    for lane in lanes:
        total = (total ^ _round(0, lane)) * PRIME_1 + PRIME_4
    return total


def _rest(text: bytes, total: int) -> int:
    """Mix in the last 0 to 31 bytes: eight at a time, then four, then one by one."""
    while len(text) >= 8:
        total = _rotate(total ^ _round(0, int.from_bytes(text[:8], "little")), 27) * PRIME_1 + PRIME_4
        text = text[8:]
    if len(text) >= 4:
        total = _rotate(total ^ (int.from_bytes(text[:4], "little") * PRIME_1), 23) * PRIME_2 + PRIME_3
        text = text[4:]
    for byte in text:
        total = _rotate(total ^ (byte * PRIME_5), 11) * PRIME_1
    return total & _WORD


def _avalanche(total: int) -> int:
    """Let every bit of the input change every bit of the result."""
    total = (total ^ (total >> 33)) * PRIME_2 & _WORD
    total = (total ^ (total >> 29)) * PRIME_3 & _WORD
    return total ^ (total >> 32)


def _round(lane: int, word: int) -> int:
    return _rotate(lane + word * PRIME_2, 31) * PRIME_1 & _WORD


def _rotate(word: int, by: int) -> int:
    word &= _WORD
    return (word << by | word >> (64 - by)) & _WORD
