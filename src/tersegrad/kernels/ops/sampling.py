"""Drawing positions without replacement."""

from tersegrad.kernels.ops.hashing import split_key

__all__ = ["check_sampling", "shift_of"]

_OTHER_DRAW = 0x2545F4914F6CDD1D  # turns a key into an unrelated one


def shift_of(n: int, key: int) -> int:
    """By how much all positions are rotated: 0 to n - 1, drawn from 64 bits of the key."""
    low, high = split_key(key ^ _OTHER_DRAW)
    return (high << 32 | low) * n >> 64


def check_sampling(n: int, k: int) -> None:
    """Raise ValueError unless k different positions of n can be drawn and written as int32."""
    if not 0 <= k <= n < 2**31:
        raise ValueError(f"cannot draw {k} different positions of {n} elements: k is from 0 to n, and n below 2^31")
