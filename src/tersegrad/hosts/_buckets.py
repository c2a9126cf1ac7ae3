"""The buckets that DistributedDataParallel makes of a model, without one."""

import sys
from collections.abc import Sequence

from torch import Tensor
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size  # what DDP itself calls

FIRST_NBYTES = 1 << 20  # DDP keeps its first bucket small, so that it can be sent early
CAP_NBYTES = 25 << 20

Named = Sequence[tuple[str, Tensor]]


def first_buckets(parameters: Named) -> list[tuple[str, ...]]:
    """Of the first step: DDP does not know yet in which order gradients come, and makes one bucket a dtype."""
    return _assign(parameters, [sys.maxsize])[::-1]


def rebuilt_buckets(ready: Named, limits: list[int] | None = None) -> list[tuple[str, ...]]:
    """Of all later steps, from the parameters in the order in which their gradients came.

    ``limits``: bytes of the first bucket and of the others, if not DDP's usual ones.
    """
    return _assign(ready, limits or [FIRST_NBYTES, CAP_NBYTES], list(range(len(ready))))


def _assign(parameters: Named, limits: list[int], indices: list[int] | None = None) -> list[tuple[str, ...]]:
    tensors = [parameter for _, parameter in parameters]
    dense = [False] * len(tensors)
    found, _ = _compute_bucket_assignment_by_size(tensors, limits, dense, indices or [])
    return [tuple(parameters[i][0] for i in bucket) for bucket in found]
