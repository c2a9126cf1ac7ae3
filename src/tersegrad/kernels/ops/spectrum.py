"""Half spectra as pairs of numbers."""

import math

import torch
from torch import Tensor

__all__ = ["ROOT_2", "ROOT_HALF", "check_fold", "check_pair_indices"]

ROOT_2 = math.sqrt(2.0)  # rounded to float32 where it is used
ROOT_HALF = math.sqrt(0.5)


def check_fold(half: Tensor, bins: Tensor | None = None, magnitudes: Tensor | None = None) -> None:
    """Raise ValueError unless bins and magnitudes, if given, have the lengths that belong to these half spectra."""
    if half.dim() != 2 or half.shape[1] < 2 or half.dtype != torch.complex64:
        raise ValueError(f"half spectra are rows of complex64 of 2 or more; these are {half.dtype} {tuple(half.shape)}")
    count = half.shape[0] * (half.shape[1] - 1)
    if bins is None:
        return
    if bins.numel() != 2 * count or (magnitudes is not None and magnitudes.numel() != count):
        seen = f"{bins.numel()} numbers" + ("" if magnitudes is None else f" and {magnitudes.numel()} magnitudes")
        raise ValueError(f"half spectra of shape {tuple(half.shape)} have {count} bins, got {seen}")


def check_pair_indices(pairs: Tensor, indices: Tensor, values: Tensor) -> None:
    """Raise ValueError unless there are whole pairs, and two values for each index."""
    if pairs.numel() % 2:
        raise ValueError(f"{pairs.numel()} numbers are not pairs: the count must be even")
    if values.numel() != 2 * indices.numel():
        raise ValueError(f"{indices.numel()} indices but {values.numel()} values: there must be two for each")
