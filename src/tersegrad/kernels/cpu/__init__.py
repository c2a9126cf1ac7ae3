"""Kernels for the CPU, in Numba: no compiler at install, the GIL released, machine code cached on disk."""

from tersegrad.kernels.cpu.add import add_scaled
from tersegrad.kernels.cpu.add_select import add_top_k
from tersegrad.kernels.cpu.bits import pack_bits, packed_nbytes, unpack_bits
from tersegrad.kernels.cpu.blockwise import block_scales, blockwise_decode_add, blockwise_encode
from tersegrad.kernels.cpu.checksum import xxh64
from tersegrad.kernels.cpu.draw import stratified
from tersegrad.kernels.cpu.indices import bitmap_decode, bitmap_encode, gap_decode, gap_encode, gap_plan
from tersegrad.kernels.cpu.momentum import add_momentum, mask_sent
from tersegrad.kernels.cpu.natural import natural_decode_add, natural_encode
from tersegrad.kernels.cpu.powers import power_decode, power_encode
from tersegrad.kernels.cpu.qsgd import bucket_scales, qsgd_decode_add, qsgd_encode, quantise
from tersegrad.kernels.cpu.range_float import abs_max, range_decode_add, range_encode
from tersegrad.kernels.cpu.scatter import scatter_sum
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
from tersegrad.kernels.cpu.signs import break_ties, one_bit_encode, scaled_sign_encode, signs_decode_add
from tersegrad.kernels.cpu.slices import from_slices, to_slices
from tersegrad.kernels.cpu.spectrum import fold, gather_pairs, scatter_add_pairs, unfold
from tersegrad.kernels.cpu.squares import add_squares, add_token_squares
from tersegrad.kernels.cpu.ternary import ternary_decode_add, ternary_encode, ternary_scales
from tersegrad.kernels.cpu.totals import count_above, moments
from tersegrad.kernels.cpu.variance import unambiguous

__all__ = [
    "above",
    "abs_log_sum",
    "abs_max",
    "abs_sums",
    "add_momentum",
    "add_scaled",
    "add_squares",
    "add_token_squares",
    "add_top_k",
    "all_finite",
    "bitmap_decode",
    "bitmap_encode",
    "block_scales",
    "blockwise_decode_add",
    "blockwise_encode",
    "break_ties",
    "bucket_scales",
    "count_above",
    "fold",
    "from_slices",
    "gap_decode",
    "gap_encode",
    "gap_plan",
    "gather",
    "gather_pairs",
    "mask_sent",
    "moments",
    "natural_decode_add",
    "natural_encode",
    "one_bit_encode",
    "pack_bits",
    "packed_nbytes",
    "power_decode",
    "power_encode",
    "qsgd_decode_add",
    "qsgd_encode",
    "quantise",
    "range_decode_add",
    "range_encode",
    "scaled_sign_encode",
    "scatter_add",
    "scatter_add_pairs",
    "scatter_sum",
    "signs_decode_add",
    "stratified",
    "ternary_decode_add",
    "ternary_encode",
    "ternary_scales",
    "to_slices",
    "top_k",
    "top_k_capacity",
    "unambiguous",
    "unfold",
    "unpack_bits",
    "xxh64",
]
