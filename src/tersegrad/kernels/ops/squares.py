"""Argument checks for sums of squares of per-sample gradients."""

import torch
from torch import Tensor

from tersegrad.kernels.ops.answers import read

__all__ = ["check_rows", "check_tokens"]


def check_rows(sums: Tensor, gradients: Tensor) -> None:
    """Raise ValueError unless ``gradients`` consists of rows as long as ``sums``."""
    if gradients.numel() % max(1, sums.numel()) or (gradients.numel() and not sums.numel()):
        raise ValueError(f"{gradients.numel()} elements are not rows of {sums.numel()}")


def check_tokens(sums: Tensor, tokens: Tensor, deltas: Tensor, samples: int) -> int:
    """Return the length of a row; ValueError if lengths do not fit, IndexError if a token has no row in ``sums``.

    This reads ``tokens``.
    """
    count = tokens.numel()
    if count == 0 and deltas.numel() == 0:
        return 1
    width = deltas.numel() // max(1, count)
    if samples < 1 or count % samples or width == 0 or width * count != deltas.numel() or sums.numel() % width:
        raise ValueError(
            f"{count} tokens in {samples} samples, {deltas.numel()} deltas and {sums.numel()} sums do not fit together"
        )
    low, high = read(*torch.aminmax(tokens))
    if low < 0 or high >= sums.numel() // width:
        raise IndexError(f"tokens reach from {low} to {high}, but they index a table of {sums.numel() // width} rows")
    return width
