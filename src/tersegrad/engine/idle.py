"""Tensors that a worker has no gradient of in a step: where the host finds unused parameters, their slice is zero."""

import torch
from torch import Tensor

from tersegrad.core import Layout


def idle_tensors(gradient: Tensor, layout: Layout) -> frozenset[str]:
    """The names of the tensors of a bucket whose gradient is zero throughout.

    Only those whose first element is zero are looked at.
    """
    filled = [i for i, size in enumerate(layout.sizes) if size]
    starts = torch.tensor([layout.offsets[i] for i in filled], device=gradient.device)
    suspects = (gradient[starts] == 0).tolist()
    found = [i for i, suspect in zip(filled, suspects, strict=True) if suspect]
    return frozenset(
        layout.names[i] for i in found if not bool(gradient[layout.offsets[i] : layout.offsets[i + 1]].any())
    )
