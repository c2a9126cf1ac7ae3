"""The bit pattern of a float32."""

from struct import Struct

__all__ = ["ABS_MASK", "FLOAT32_MAX", "INF_BITS", "MANTISSA_BITS", "NORMAL_BITS", "bits_of", "float_of"]

ABS_MASK = 0x7FFFFFFF  # everything but the sign
INF_BITS = 0x7F800000  # |x| has these bits or more <=> x is infinite or NaN
NORMAL_BITS = 0x00800000  # the pattern of 2^-126, the smallest normal number
MANTISSA_BITS = 23
FLOAT32_MAX = 2.0**128 - 2.0**104  # the largest finite number

_FLOAT, _INT = Struct("<f"), Struct("<i")  # twenty times as fast as a one-element tensor


def bits_of(value: float) -> int:
    """The bit pattern of a float32, as an integer.

    >>> hex(bits_of(0.125))
    '0x3e000000'
    """
    return int(_INT.unpack(_FLOAT.pack(value))[0])


def float_of(bits: int) -> float:
    """The float32 with this bit pattern."""
    return float(_FLOAT.unpack(_INT.pack(bits))[0])
