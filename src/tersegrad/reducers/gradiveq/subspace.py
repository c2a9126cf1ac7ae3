"""Subspace: slices of a gradient as coefficients in an orthonormal basis around a mean."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Subspace:
    """``c = U^T (g - mu)`` and back, ``U c + mu``, for every slice g of a layer and its mean mu.

    The map is affine: the coefficients of a sum are not the sum of coefficients. But as every worker subtracts the
    whole mu, the mean over workers of their coefficients equals the coefficients of the mean gradient.
    """

    basis: Tensor  # (groups, K, d): each group of consecutive slices has its own U
    mean: Tensor  # (slices, K)
    offset: Tensor  # (slices, d): U^T mu, which is cheaper to subtract than mu

    @staticmethod
    def around(mean: Tensor, basis: Tensor) -> "Subspace":
        """The subspace with this mean and this basis."""
        groups, length, d = basis.shape
        offset = torch.bmm(mean.view(groups, -1, length), basis)
        return Subspace(basis, mean, offset.view(-1, d))

    @property
    def size(self) -> int:
        """The number of coefficients."""
        return self.offset.numel()

    @property
    def count(self) -> int:
        """The number of slices."""
        return self.mean.shape[0]

    def rows(self, first: int, last: int) -> "Subspace":
        """The same for some of the slices; all of a group, or any if there is only one."""
        each = self.count // self.basis.shape[0]
        basis = self.basis if self.basis.shape[0] == 1 else self.basis[first // each : last // each]
        return Subspace(basis, self.mean[first:last], self.offset[first:last])

    def encode(self, slices: Tensor, c: Tensor) -> None:
        """``c = U^T g - U^T mu``, into the vector ``c``."""
        torch.bmm(self._grouped(slices), self.basis, out=self._grouped(c))
        c.sub_(self.offset.view(-1))

    def decode(self, c: Tensor, slices: Tensor) -> None:
        """``slices = U c``. The mean is added by ``Slicing.join``, in the pass that reorders the slices."""
        torch.bmm(self._grouped(c), self.basis.mT, out=self._grouped(slices))

    def decode_in_order(self, c: Tensor, slices: Tensor, subtract: bool) -> None:
        """``slices = U c + mu``, or ``slices -= U c + mu``."""
        slices, sign = self._grouped(slices), -1 if subtract else 1
        around = slices.sub_(self._grouped(self.mean)) if subtract else self._grouped(self.mean)
        torch.baddbmm(around, self._grouped(c), self.basis.mT, alpha=sign, out=slices)

    def energies(self, slices: Tensor, c: Tensor) -> tuple[float, float]:
        """``|g|^2``, and ``|g - mu - U c|^2``; as U is orthonormal, that is ``|g - mu|^2 - |c|^2``."""
        g, mean = slices.view(-1), self.mean.view(-1)
        energy = float(g @ g)
        return energy, energy - 2 * float(g @ mean) + float(mean @ mean) - float(c @ c)

    def _grouped(self, flat: Tensor) -> Tensor:
        groups = self.basis.shape[0]
        return flat.view(groups, self.count // groups, -1)
