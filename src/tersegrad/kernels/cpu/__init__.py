"""Kernels for the CPU, in Numba: no compiler at install, the GIL released, machine code cached on disk."""

from tersegrad.kernels.cpu.checksum import xxh64
from tersegrad.kernels.cpu.indices import bitmap_decode, bitmap_encode, gap_decode, gap_encode, gap_plan
from tersegrad.kernels.cpu.select import (
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
