"""Random numbers as a hash of a key and a counter, as ``kernels.reference.sampling`` defines them."""

from typing import Any

import numba
import numpy as np

from tersegrad.kernels import ops
from tersegrad.kernels.cpu._arrays import i32, u32
from tersegrad.kernels.ops import UNIFORM_BITS

MIX_1, MIX_2, MIX_3 = np.uint32(ops.MIX_1), np.uint32(ops.MIX_2), np.uint32(ops.MIX_3)
CHANCES = np.float32(2.0**UNIFORM_BITS)


def halves(key: int) -> tuple[np.uint32, np.uint32]:
    """The two halves of a key."""
    low, high = ops.split_key(key)
    return np.uint32(low), np.uint32(high)


@numba.njit(nogil=True, cache=True, forceinline=True)
def hashed(counter: Any, low: Any, high: Any) -> Any:
    """A hash of 32 bits of the counter and both halves of the key."""
    h = u32(u32(counter) + low)
    h = u32(u32(u32(h ^ u32(h >> u32(16))) * MIX_1) + high)
    h = u32(u32(h ^ u32(h >> u32(13))) * MIX_2)
    h = u32(u32(h ^ u32(h >> u32(16))) * MIX_3)
    return u32(h ^ u32(h >> u32(15)))


@numba.njit(nogil=True, cache=True, forceinline=True)
def uniform(counter: Any, low: Any, high: Any) -> Any:
    """The highest 24 bits of the hash, as int32."""
    return i32(hashed(counter, low, high) >> u32(32 - UNIFORM_BITS))
