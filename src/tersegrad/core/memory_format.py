"""How a parameter's elements lie in DDP's flat buckets."""

import torch
from torch import Tensor


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """Of a parameter's slice of a bucket: DDP lays out complex numbers as pairs.

    >>> shape_of(torch.zeros(3, 4, dtype=torch.complex64))
    (3, 4, 2)
    """
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def shaped(part: Tensor, parameter: Tensor) -> Tensor:
    """A parameter's slice of a flat bucket, in the parameter's shape; a view.

    DDP keeps the order in which the parameter itself lies in memory, which is not the order of its indices in a model
    with ``memory_format=torch.channels_last``. (``GradBucket.gradients()`` does not: its views are of another order.)

    >>> weight = torch.arange(8.0).view(1, 2, 2, 2).to(memory_format=torch.channels_last)
    >>> bool((shaped(torch.tensor([0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]), weight) == weight).all())
    True
    """
    if parameter.is_complex():
        return torch.view_as_complex(part.view(*parameter.size(), 2))
    if not parameter.is_contiguous() and _fills_its_memory(parameter):
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.size())


def flat(parameter: Tensor) -> Tensor | None:
    """The parameter as it lies in memory, in the order of its slice of a bucket; a view.

    None if its memory has gaps, as that of a part of a larger tensor may have.

    >>> flat(torch.arange(8.0).view(1, 2, 2, 2).to(memory_format=torch.channels_last))
    tensor([0., 4., 1., 5., 2., 6., 3., 7.])
    >>> flat(torch.zeros(4, 4)[:, :2])
    """
    return parameter.as_strided((parameter.numel(),), (1,)) if _fills_its_memory(parameter) else None


def _fills_its_memory(parameter: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(parameter))
