"""A convolution's gradient in an order that can be split into slices, and back, in plain torch: the definition.

A weight is (filters, rest); the rest is in blocks of ``run * positions``, depth first. The slices' order is:

    run = 1:        positions, depth, filters           (a transposition, if positions = 1 too)
    positions = 1:  blocks, filters, run                (runs of ``run`` elements stay together)

A row of that order is ``filters * run`` elements. ``first`` is the row that the slices given begin with: they may be
some of the rows only.
"""

from torch import Tensor

from tersegrad.kernels.ops import check_slices

__all__ = ["from_slices", "to_slices"]


def to_slices(x: Tensor, slices: Tensor, filters: int, positions: int = 1, run: int = 1, first: int = 0) -> None:
    """Write rows of ``x`` into ``slices``, in the order of slices.

    >>> import torch
    >>> slices = torch.empty(6)
    >>> to_slices(torch.arange(6.0), slices, filters=2, positions=3), slices.tolist()
    (None, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0])
    >>> slices = torch.empty(8)
    >>> to_slices(torch.arange(8.0), slices, filters=2, run=2), slices.tolist()
    (None, [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0])
    >>> to_slices(torch.arange(8.0), slices[:4], filters=2, run=2, first=1), slices[:4].tolist()
    (None, [2.0, 3.0, 6.0, 7.0])
    """
    check_slices(x, slices, filters, positions, run, first)
    for rows, weight in _row_groups(x, slices, filters, positions, run, first):
        rows.copy_(weight)


def from_slices(
    slices: Tensor,
    mean: Tensor,
    x: Tensor,
    filters: int,
    positions: int = 1,
    run: int = 1,
    subtract: bool = False,
    first: int = 0,
) -> None:
    """``x = slices + mean``, or ``x -= slices + mean``, in those rows, with ``x`` in the order of the weight.

    >>> import torch
    >>> x = torch.empty(6)
    >>> from_slices(torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]), torch.ones(6), x, filters=2, positions=3)
    >>> x.tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    check_slices(x, slices, filters, positions, run, first)
    check_slices(x, mean, filters, positions, run, first)
    if slices.numel() != mean.numel():
        raise ValueError(f"{slices.numel()} elements do not go with a mean of {mean.numel()}")
    for rows, weight in _row_groups(x, slices + mean, filters, positions, run, first):
        if subtract:
            weight.sub_(rows)
        else:
            weight.copy_(rows)


def _row_groups(
    x: Tensor, slices: Tensor, filters: int, positions: int, run: int, first: int
) -> list[tuple[Tensor, Tensor]]:
    """Views (rows, filters, run) of the slices and of the weight, for each position that has rows in the slices."""
    rows = slices.view(-1, filters, run)
    weight = x.view(filters, -1, run, positions).permute(3, 1, 0, 2)
    depth, last = weight.shape[1], first + len(rows)
    groups = []
    for p in range(positions):
        start, stop = max(first, p * depth), min(last, (p + 1) * depth)
        if start < stop:
            groups.append((rows[start - first : stop - first], weight[p, start - p * depth : stop - p * depth]))
    return groups
