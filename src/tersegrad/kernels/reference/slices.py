"""A convolution's gradient in an order that can be split into slices, and back, in plain torch: the definition.

A weight is (filters, rest); the rest is in blocks of ``run * positions``, depth first. The slices' order is:

    run = 1:        positions, depth, filters           (a transposition, if positions = 1 too)
    positions = 1:  blocks, filters, run                (runs of ``run`` elements stay together)
"""

from torch import Tensor

from tersegrad.kernels.ops import check_slices

__all__ = ["from_slices", "to_slices"]


def to_slices(x: Tensor, slices: Tensor, filters: int, positions: int = 1, run: int = 1) -> None:
    """Write ``x`` into ``slices``, in the order of slices.

    >>> import torch
    >>> slices = torch.empty(6)
    >>> to_slices(torch.arange(6.0), slices, filters=2, positions=3), slices.tolist()
    (None, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0])
    >>> slices = torch.empty(8)
    >>> to_slices(torch.arange(8.0), slices, filters=2, run=2), slices.tolist()
    (None, [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0])
    """
    check_slices(x, slices, filters, positions, run)
    _ordered(slices, filters, positions, run).copy_(x.view(filters, -1, run, positions))


def from_slices(
    slices: Tensor, mean: Tensor, x: Tensor, filters: int, positions: int = 1, run: int = 1, subtract: bool = False
) -> None:
    """``x = slices + mean``, or ``x -= slices + mean``, with ``x`` in the order of the weight.

    >>> import torch
    >>> x = torch.empty(6)
    >>> from_slices(torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]), torch.ones(6), x, filters=2, positions=3)
    >>> x.tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    check_slices(x, slices, filters, positions, run)
    check_slices(x, mean, filters, positions, run)
    whole = _ordered(slices + mean, filters, positions, run)
    seen = x.view(filters, -1, run, positions)
    if subtract:
        seen.sub_(whole)
    else:
        seen.copy_(whole)


def _ordered(slices: Tensor, filters: int, positions: int, run: int) -> Tensor:
    """A view of slices in the order of the weight."""
    return slices.view(positions, -1, filters, run).permute(2, 1, 3, 0)
