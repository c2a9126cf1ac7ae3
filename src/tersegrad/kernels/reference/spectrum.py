"""Half spectra as pairs of numbers, in plain torch: the definition fast kernels must meet.

A piece of even length L has the half spectrum X[0..L/2] (``torch.fft.rfft``). X[0] and X[L/2] are real, and every other
one stands for itself and its mirror image. So L numbers are enough, as L/2 pairs, the *bins*:

    bin 0 = (X[0], X[L/2]),  bin f = sqrt(2) * (Re X[f], Im X[f])  for 0 < f < L/2

If X is scaled by 1/sqrt(L), a piece and its bins have the same sum of squares.
"""

import torch
from torch import Tensor

from tersegrad.kernels.ops import ROOT_2, ROOT_HALF, check_fold, check_indices, check_pair_indices

__all__ = ["fold", "gather_pairs", "scatter_add_pairs", "unfold"]


def fold(half: Tensor, bins: Tensor, magnitudes: Tensor) -> None:
    """Convert half spectra (complex64, one row per piece) to bins, and the magnitude of each, sqrt(a^2 + b^2).

    Squares are taken in float32: they overflow above 1e19 and lose precision below 1e-19.

    >>> half, bins, magnitudes = torch.fft.rfft(torch.ones(1, 4)), torch.empty(4), torch.empty(2)
    >>> fold(half, bins, magnitudes)
    >>> bins.tolist(), magnitudes.tolist()
    ([4.0, 0.0, 0.0, 0.0], [4.0, 0.0])
    """
    check_fold(half, bins, magnitudes)
    pairs = torch.view_as_real(half)[:, :-1] * ROOT_2
    pairs[:, 0, 0], pairs[:, 0, 1] = half[:, 0].real, half[:, -1].real
    bins.copy_(pairs.reshape(-1))
    squares = pairs[..., 0].square() + pairs[..., 1].square()
    magnitudes.copy_(squares.double().sqrt().reshape(-1))  # torch's own float32 square root is not always the nearest


def unfold(bins: Tensor, half: Tensor) -> None:
    """Convert bins back to half spectra.

    >>> half = torch.empty(1, 3, dtype=torch.complex64)
    >>> unfold(torch.tensor([4.0, 0.0, 0.0, 0.0]), half), half.tolist()
    (None, [[(4+0j), 0j, 0j]])
    """
    check_fold(half, bins)
    pairs = torch.view_as_complex(bins.view(half.shape[0], half.shape[1] - 1, 2))
    half[:, :-1] = pairs * ROOT_HALF
    half[:, 0], half[:, -1] = pairs[:, 0].real, pairs[:, 0].imag


def gather_pairs(pairs: Tensor, indices: Tensor, values: Tensor) -> None:
    """``values[2i], values[2i + 1] = `` pair number ``indices[i]``; IndexError if there is no such pair.

    >>> values = torch.empty(2)
    >>> gather_pairs(torch.arange(6.0), torch.tensor([1], dtype=torch.int32), values), values.tolist()
    (None, [2.0, 3.0])
    """
    check_pair_indices(pairs, indices, values)
    check_indices(indices, pairs.numel() // 2)
    torch.index_select(pairs.view(-1, 2), 0, indices, out=values.view(-1, 2))


def scatter_add_pairs(acc: Tensor, indices: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale * (values[2i], values[2i + 1])``, rounded to float32, to pair number ``indices[i]``.

    All indices are checked before anything is written; IndexError if there is no such pair.

    >>> acc = torch.zeros(6)
    >>> scatter_add_pairs(acc, torch.tensor([1], dtype=torch.int32), torch.tensor([2.0, 4.0]), 0.5), acc.tolist()
    (None, [0.0, 0.0, 1.0, 2.0, 0.0, 0.0])
    """
    check_pair_indices(acc, indices, values)
    check_indices(indices, acc.numel() // 2)
    acc.view(-1, 2).index_add_(0, indices, values.view(-1, 2) * torch.tensor(scale, dtype=torch.float32))
