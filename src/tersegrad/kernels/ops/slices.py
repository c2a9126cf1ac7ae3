"""Argument checks for a convolution's gradient in slices."""

import torch
from torch import Tensor

__all__ = ["check_slices"]


def check_slices(x: Tensor, slices: Tensor, filters: int, positions: int, run: int, first: int) -> None:
    """Raise unless ``slices`` is whole rows of ``x`` in the order of slices, from row ``first`` on."""
    for tensor in (x, slices):
        if tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(f"slices are made of contiguous 1-D float32, got {tensor.dtype} {tuple(tensor.shape)}")
    block = filters * positions * run
    if min(filters, positions, run) < 1 or min(positions, run) > 1 or x.numel() % block or not x.numel():
        raise ValueError(f"{x.numel()} elements are not {filters} filters of {positions} positions in runs of {run}")
    row = filters * run
    if slices.numel() % row or not 0 <= row * first <= x.numel() - slices.numel():
        raise ValueError(f"{slices.numel()} elements are not rows of {row}, from row {first} on, of {x.numel()}")
