"""Principal axes: the few directions that span nearly all the energy of some samples."""

import torch
from torch import Tensor

EXACT = 1e-4  # relative singular value down to which axes are orthogonal to 1e-16 / EXACT^2, a float's precision


def principal_axes(rows: Tensor, loss: float) -> Tensor:
    """Orthonormal columns that span all but ``loss`` of the energy of the rows, as few as that takes.

    ``rows`` is (groups, samples, length), centred; the result is (groups, length, d) in float32, with one d for all:

        d = the smallest with  sum_(k<=d) s_k^2 >= (1 - loss) sum_k s_k^2,   s_k the singular values, groups added up

    They come from the eigenvectors of the smaller of A A^T and A^T A, in float64: eigenvalues are s^2, and half of the
    digits of a double are more than a float has. There is at least one column.

    >>> principal_axes(torch.tensor([[[3.0, 0.0], [-3.0, 0.0], [0.0, 0.1]]]), loss=0.01).abs().tolist()
    [[[1.0], [0.0]]]
    """
    a = rows.double()
    wide = a.shape[1] < a.shape[2]
    values, vectors = torch.linalg.eigh(a @ a.mT if wide else a.mT @ a)  # ascending
    d = rank_for(values.clamp_(min=0).sum(0).flip(0), loss)
    axes: Tensor = vectors[:, :, -d:].flip(2)
    if wide:
        axes = a.mT @ axes  # columns have norm s
        lengths = axes.norm(dim=1, keepdim=True)
        exact = bool((lengths > EXACT * lengths.max()).all())
        axes = (
            axes / lengths if exact else torch.linalg.qr(axes).Q
        )  # columns of small norm are inexact, their span is not
    return axes.float().contiguous()


def rank_for(energies: Tensor, loss: float) -> int:
    """How many of the descending energies add up to ``1 - loss`` of their sum; rounding errors count as zero.

    >>> rank_for(torch.tensor([90.0, 9.5, 0.5]).double(), loss=0.01), rank_for(torch.tensor([1.0, 1e-20]).double(), 0.0)
    (2, 1)
    """
    floor = energies[0] * len(energies) * torch.finfo(energies.dtype).eps
    total = torch.where(energies > floor, energies, 0).cumsum(0)
    return min(len(energies), 1 + int((total < (1 - loss) * total[-1]).sum()))


def energy_outside(rows: Tensor, axes: Tensor) -> float:
    """The energy of (groups, samples, length) rows outside the span of the axes."""
    outside = rows - (rows @ axes) @ axes.mT
    return float(outside.double().square().sum())
