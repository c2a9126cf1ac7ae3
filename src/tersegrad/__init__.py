"""tersegrad: data-parallel PyTorch training on slow networks, by sending few bytes per step.

    model = DistributedDataParallel(model)
    handle = tersegrad.attach(model, "topk")

The contract of every method is the docstring of ``tersegrad.core``.
"""

__version__ = "0.1.0"

from tersegrad.compressors import *  # noqa: F403
from tersegrad.compressors import __all__ as _compressors
from tersegrad.core import Bucket, Comm, Compressor, Payload, Reducer
from tersegrad.ddp import Handle, attach
from tersegrad.inspection import roundtrip
from tersegrad.reducers import *  # noqa: F403
from tersegrad.reducers import __all__ as _reducers
from tersegrad.spec import parse
from tersegrad.taps import Metered, Throttled
from tersegrad.wrappers import *  # noqa: F403
from tersegrad.wrappers import __all__ as _wrappers

__all__ = [
    "Bucket",
    "Comm",
    "Compressor",
    "Handle",
    "Metered",
    "Payload",
    "Reducer",
    "Throttled",
    "attach",
    "parse",
    "roundtrip",
    *_compressors,
    *_reducers,
    *_wrappers,
]
