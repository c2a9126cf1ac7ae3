"""A convolution's gradient in the order in which its filters lie side by side, and back, in plain torch.

This is the definition that fast kernels must meet. A weight is (filters, depth, positions); its slices are cut from the
order (positions, depth, filters).
"""

import torch
from torch import Tensor


def to_slices(x: Tensor, slices: Tensor, filters: int, positions: int) -> None:
    """Writes ``x`` into ``slices``, with the filters fastest, then depth, then positions.

    >>> slices = torch.empty(6)
    >>> to_slices(torch.arange(6.0), slices, filters=2, positions=3), slices.tolist()
    (None, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0])
    """
    check_slices(x, slices, filters, positions)
    seen = x.view(filters, -1, positions)
    slices.view(positions, -1, filters).copy_(seen.permute(2, 1, 0))


def from_slices(slices: Tensor, mean: Tensor, x: Tensor, filters: int, positions: int, subtract: bool = False) -> None:
    """``x = slices + mean``, or ``x -= slices + mean``, with ``x`` in its own order.

    >>> x = torch.empty(6)
    >>> from_slices(torch.tensor([0.0, 3.0, 1.0, 4.0, 2.0, 5.0]), torch.ones(6), x, filters=2, positions=3)
    >>> x.tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    """
    check_slices(x, slices, filters, positions)
    check_slices(x, mean, filters, positions)
    whole = (slices + mean).view(positions, -1, filters).permute(2, 1, 0)
    seen = x.view(filters, -1, positions)
    if subtract:
        seen.sub_(whole)
    else:
        seen.copy_(whole)


def check_slices(x: Tensor, slices: Tensor, filters: int, positions: int) -> None:
    """Raise unless both are float32 vectors of one length, a multiple of filters * positions."""
    for tensor in (x, slices):
        if tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(f"slices are made of contiguous 1-D float32, got {tensor.dtype} {tuple(tensor.shape)}")
    if x.numel() != slices.numel() or filters < 1 or positions < 1 or x.numel() % (filters * positions):
        raise ValueError(
            f"{x.numel()} elements do not go into {slices.numel()} as {filters} filters of {positions} positions"
        )
