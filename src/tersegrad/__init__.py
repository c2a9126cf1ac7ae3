"""tersegrad: data-parallel PyTorch training on slow networks, by sending few bytes per step.

    model = DistributedDataParallel(model)
    handle = tersegrad.attach(model, "topk")

The contract of every method is the docstring of ``tersegrad.core``.
"""

import warnings
from typing import TYPE_CHECKING, Any

from tersegrad.auto import Auto
from tersegrad.comm.frame import FrameError
from tersegrad.comm.metered import Metered
from tersegrad.comm.throttled import Throttled
from tersegrad.comm.torch import NetworkError
from tersegrad.compressors import (
    BF16,
    FFT,
    FP16,
    QSGD,
    Blockwise,
    GaussianK,
    Identity,
    Natural,
    OneBit,
    PerTensor,
    RandomK,
    RangeFloat,
    RedSync,
    SampledTopK,
    ScaledSign,
    SIDCo,
    Sparse,
    Strom,
    TernGrad,
    Threshold,
    TopK,
)
from tersegrad.core import Comm, Compressor, Layout, Payload, Reducer, Step
from tersegrad.core.version import __version__
from tersegrad.engine.replicas import ReplicasDifferError
from tersegrad.engine.roll_call import StepsDifferError
from tersegrad.engine.roundtrip import roundtrip
from tersegrad.hosts import Handle, Simulation, Training, attach
from tersegrad.reducers import VGC, AllGather, AllReduce, Dense, GradiVeQ, PowerSGD, Ring, SignSGD, TwoShot
from tersegrad.specs import parse
from tersegrad.wrappers import (
    ByDimension,
    ByName,
    BySize,
    ErrorFeedback,
    Every,
    LowMemory,
    MomentumCorrection,
    Schedule,
    StepAhead,
    Warmup,
)

if TYPE_CHECKING:
    from tersegrad.lab.simulate import simulate

__all__ = [
    "BF16",
    "FFT",
    "FP16",
    "QSGD",
    "VGC",
    "AllGather",
    "AllReduce",
    "Auto",
    "Blockwise",
    "ByDimension",
    "ByName",
    "BySize",
    "Comm",
    "Compressor",
    "Dense",
    "ErrorFeedback",
    "Every",
    "FrameError",
    "GaussianK",
    "GradiVeQ",
    "Handle",
    "Identity",
    "Layout",
    "LowMemory",
    "Metered",
    "MomentumCorrection",
    "Natural",
    "NetworkError",
    "OneBit",
    "Payload",
    "PerTensor",
    "PowerSGD",
    "RandomK",
    "RangeFloat",
    "RedSync",
    "Reducer",
    "ReplicasDifferError",
    "Ring",
    "SIDCo",
    "SampledTopK",
    "ScaledSign",
    "Schedule",
    "SignSGD",
    "Simulation",
    "Sparse",
    "Step",
    "StepAhead",
    "StepsDifferError",
    "Strom",
    "TernGrad",
    "Threshold",
    "Throttled",
    "TopK",
    "Training",
    "TwoShot",
    "Warmup",
    "__version__",
    "attach",
    "parse",
    "roundtrip",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """``simulate``, which needs the laboratory's packages; and a name of version 0.1, until the next release."""
    if name == "simulate":
        from tersegrad.lab.simulate import simulate

        return simulate
    if name == "Bucket":
        warnings.warn(
            "tersegrad.Bucket is now tersegrad.Layout, and what changes is Step.", FutureWarning, stacklevel=2
        )
        return Layout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
