"""Every value as a signed power of two in 4 bits: the quantiser of VGC.

Tsuzuku, Imachi and Akiba, "Variance-based gradient compression for efficient distributed deep learning", 2018.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._fixed_width import FixedWidth, codes_below
from tersegrad.kernels.ops import FAINT


@dataclass(frozen=True, repr=False)
class Pow2(FixedWidth):
    """Sign and 3 bits d: decode = sign * 2^(E - d), where E = floor(log2 of the group's largest magnitude).

    A value becomes the nearest power of two (at 1.5 * 2^e the larger one), at most 2^E and at least 2^(E - 7). Smaller
    values underflow and become +-2^(E - 7): leave them out before encoding (``faint`` finds them).
    """

    bits: ClassVar[int] = 4
    group_nbytes: ClassVar[int] = 1

    def to_codes(self, values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        """d in the low 3 bits, the sign above them; one exponent per group."""
        codes = torch.empty(values.numel(), dtype=torch.uint8, device=values.device)
        exponents = torch.empty(groups.numel(), dtype=torch.int8, device=values.device)
        kernels.on(values).power_encode(values, groups, exponents, codes)
        return codes, exponents.view(torch.uint8)

    def from_codes(self, codes: Tensor, groups: Tensor, numbers: Tensor) -> Tensor:
        values = torch.empty(codes.numel(), device=codes.device)
        kernels.on(codes).power_decode(codes, groups, numbers.view(torch.int8), values)
        return values


def faint(values: Tensor, groups: Tensor, largest: Tensor | None = None) -> Tensor:
    """Positions of values that underflow: more than 7 binades below their group's largest, or denormal.

    ``largest``: of each group, if it is not among the values.
    """
    codec = Pow2()
    codes, _ = codec.to_codes(values, groups) if largest is None else codes_below(codec, values, groups, largest)
    return (codes >= FAINT).nonzero().flatten()
