"""Codecs for one flat vector, one file each."""

from tersegrad.compressors.cast import BF16, FP16
from tersegrad.compressors.fft import FFT
from tersegrad.compressors.identity import Identity
from tersegrad.compressors.per_tensor import PerTensor
from tersegrad.compressors.qsgd import QSGD
from tersegrad.compressors.range_float import RangeFloat
from tersegrad.compressors.sidco import SIDCo
from tersegrad.compressors.sparse import Sparse
from tersegrad.compressors.strom import Strom
from tersegrad.compressors.topk import TopK

__all__ = ["BF16", "FFT", "FP16", "QSGD", "Identity", "PerTensor", "RangeFloat", "SIDCo", "Sparse", "Strom", "TopK"]
