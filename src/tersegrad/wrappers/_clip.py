"""Local clipping: every worker scales its own gradient down before anything is remembered or sent."""

import math

from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Layout, Spec

DOC = "each tensor's local gradient is scaled down to norm clip / sqrt(workers); None: no clipping"


def require_clip(spec: Spec, clip: object) -> None:
    """Refuses what is neither None nor a norm."""
    if clip is not None and not (is_number(clip) and 0 < clip < math.inf):  # type: ignore[operator]
        raise ValueError(f"{type(spec).__name__}(clip={clip!r}): a norm above 0, or None to clip nothing.")


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def clip_tensors(x: Tensor, layout: Layout, clip: float, workers: int) -> None:
    """Scale every tensor down to a norm of at most clip / sqrt(workers), in place; non-finite ones stay so."""
    limit = clip / math.sqrt(workers)
    for tensor in x.split(layout.sizes):
        (squares,) = kernels.read(kernels.on(x).moments(tensor).squares)
        norm = math.sqrt(squares)
        if not norm <= limit:
            tensor.mul_(limit / norm)  # NaN stays NaN, and an infinity times 0 becomes one
