"""Compressors: codecs for one flat vector, one file each."""

from tersegrad.compressors._sparse import Sparse
from tersegrad.compressors.blockwise import Blockwise
from tersegrad.compressors.cast import BF16, FP16
from tersegrad.compressors.fft import FFT
from tersegrad.compressors.gaussiank import GaussianK
from tersegrad.compressors.identity import Identity
from tersegrad.compressors.natural import Natural
from tersegrad.compressors.onebit import OneBit
from tersegrad.compressors.pertensor import PerTensor
from tersegrad.compressors.qsgd import QSGD
from tersegrad.compressors.randomk import RandomK
from tersegrad.compressors.rangefloat import RangeFloat
from tersegrad.compressors.redsync import RedSync
from tersegrad.compressors.sampledtopk import SampledTopK
from tersegrad.compressors.scaledsign import ScaledSign
from tersegrad.compressors.sidco import SIDCo
from tersegrad.compressors.strom import Strom
from tersegrad.compressors.terngrad import TernGrad
from tersegrad.compressors.threshold import Threshold
from tersegrad.compressors.topk import TopK

__all__ = [
    "BF16",
    "FFT",
    "FP16",
    "QSGD",
    "Blockwise",
    "GaussianK",
    "Identity",
    "Natural",
    "OneBit",
    "PerTensor",
    "RandomK",
    "RangeFloat",
    "RedSync",
    "SIDCo",
    "SampledTopK",
    "ScaledSign",
    "Sparse",
    "Strom",
    "TernGrad",
    "Threshold",
    "TopK",
]
