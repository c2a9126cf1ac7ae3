"""What every kernel computes, in plain torch and Python: slow, readable, on any device."""

from tersegrad.kernels.reference.checksum import xxh64
from tersegrad.kernels.reference.indices import bitmap_decode, bitmap_encode, gap_decode, gap_encode, gap_plan
from tersegrad.kernels.reference.select import (
    above,
    abs_log_sum,
    abs_sums,
    all_finite,
    gather,
    scatter_add,
    top_k,
    top_k_capacity,
)

__all__ = [
    "above",
    "abs_log_sum",
    "abs_sums",
    "all_finite",
    "bitmap_decode",
    "bitmap_encode",
    "gap_decode",
    "gap_encode",
    "gap_plan",
    "gather",
    "scatter_add",
    "top_k",
    "top_k_capacity",
    "xxh64",
]
