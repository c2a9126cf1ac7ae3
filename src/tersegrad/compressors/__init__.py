"""Codecs for one flat vector, one file each."""

from tersegrad.compressors.cast import BF16, FP16
from tersegrad.compressors.identity import Identity
from tersegrad.compressors.per_tensor import PerTensor
from tersegrad.compressors.sidco import SIDCo
from tersegrad.compressors.sparse import Sparse
from tersegrad.compressors.topk import TopK

__all__ = ["BF16", "FP16", "Identity", "PerTensor", "SIDCo", "Sparse", "TopK"]
