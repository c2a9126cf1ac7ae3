"""Candidates for the largest bins of spectra that come one block after another."""

import torch
from torch import Tensor

from tersegrad.kernels.ops.spectrum import check_fold

__all__ = ["BINS_AT_ONCE", "SQUARES", "bin_capacity", "check_collect"]

BINS_AT_ONCE = 1024  # bins between two looks at whether there are too many candidates
SQUARES = (2.0**-40, 2.0**60)  # spectra whose largest magnitude lies between these may be squared in float32


def bin_capacity(bins: int, k: int) -> int:
    """The number of candidates that there must be room for.

    >>> bin_capacity(1_000_000, 1000)
    10716
    """
    if not 0 <= k <= bins:
        raise ValueError(f"cannot select the {k} largest of {bins} bins: k must be between 0 and {bins}")
    return min(bins, k + k // 2 + 8192) + BINS_AT_ONCE


def check_collect(half: Tensor, k: int, progress: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    """Raise ValueError unless the candidates have the same length, with room for k and one look ahead."""
    check_fold(half)
    room = positions.numel()
    if keys.numel() != room or values.numel() != 2 * room or room < k + BINS_AT_ONCE:
        raise ValueError(
            f"{room} positions, {keys.numel()} keys and {values.numel()} numbers: candidates for the {k} largest bins "
            f"have a position, a key and two numbers each, and there are at least {k + BINS_AT_ONCE}"
        )
    if progress.dtype != torch.int64 or progress.numel() != 3:
        raise ValueError(f"progress is three int64 numbers, got {progress.dtype} {tuple(progress.shape)}")
