"""Argument checks for a convolution's gradient in slices."""

import torch
from torch import Tensor

__all__ = ["check_slices"]


def check_slices(x: Tensor, slices: Tensor, filters: int, positions: int, run: int) -> None:
    """Raise unless both are float32 vectors of the same length, and that length fits these dimensions."""
    for tensor in (x, slices):
        if tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise TypeError(f"slices are made of contiguous 1-D float32, got {tensor.dtype} {tuple(tensor.shape)}")
    block = filters * positions * run
    if min(filters, positions, run) < 1 or min(positions, run) > 1 or x.numel() % block or not x.numel():
        raise ValueError(f"{x.numel()} elements are not {filters} filters of {positions} positions in runs of {run}")
    if x.numel() != slices.numel():
        raise ValueError(f"{x.numel()} elements do not go into {slices.numel()}")
