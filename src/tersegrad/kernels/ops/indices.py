"""Constants of the index codec (defined in ``kernels.reference.indices``)."""

__all__ = [
    "BLOCK",
    "COUNT",
    "CUT",
    "EXPONENT",
    "FINE",
    "GAP",
    "HEADER_BITS",
    "KNEES",
    "MAX_EXPONENT",
    "MAX_PREFIX",
    "MAX_WIDTH",
    "OUTSIDE",
    "PADDING",
    "TRAILING",
]

BLOCK = 512  # gaps that share a header; 256 to 4096 give nearly the same sizes
HEADER_BITS = 6
KNEES = (0, 6)  # for heavy and for geometric tails of the gaps
MAX_EXPONENT = 30
MAX_WIDTH = 31  # bits of v below its highest: v < 2**32 as every gap < 2**31
MAX_PREFIX = KNEES[1] + MAX_WIDTH + 1  # the first one bit must come within this many bits

# Results of a decoder; the comment says what the number returned with it is.
FINE = 0
CUT = 1  # the data ends too early: the number of the first missing index, or of the first one of its block
EXPONENT = 2  # an exponent above MAX_EXPONENT: the exponent
GAP = 3  # a gap of more than 31 bits: the number of its index
OUTSIDE = 4  # an index beyond the universe: the first index of its block
TRAILING = 5  # bytes after the last index: the number of bytes that were needed
PADDING = 6  # a bit is set in the padding: the number of bits before the padding
COUNT = 7  # a bitmap with too few or too many bits set: how many are set
