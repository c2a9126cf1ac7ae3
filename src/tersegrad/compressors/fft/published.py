"""The paper's own transform: the vector as a whole, in float16, and its half spectrum as it is.

n elements of any length have n // 2 + 1 bins of two numbers, the real and the imaginary part. The elements are rounded
to float16 and transformed in float32, as a CPU has no transform of float16; those beyond float16 are saturated. The
transform is scaled by 1 / sqrt(n) in both directions: then bins of gradients fit into the range from -1 to 1.
"""

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Paused, State, scratch

LARGEST = torch.finfo(torch.float16).max


def bins_of(numel: int) -> int:
    """How many bins a vector has.

    >>> bins_of(1000), bins_of(1001), bins_of(1), bins_of(0)
    (501, 501, 1, 0)
    """
    return numel // 2 + 1 if numel else 0


def domain(numel: int) -> int:
    """Two numbers per bin, and an odd one that is not used where the vector is odd: no two vectors have the same."""
    return 2 * bins_of(numel) + numel % 2


def forward(x: Tensor, bins: Tensor, magnitudes: Tensor, state: State) -> Paused[bool]:
    """Write the bins of ``x`` and their magnitudes; False, and both are unspecified, if ``x`` is non-finite."""
    (finite,) = yield (kernels.on(x).all_finite(x),)
    if not finite or not x.numel():
        return bool(finite)
    halves = scratch(state, "halves", x.numel(), torch.float16, x.device)
    rounded = scratch(state, "rounded", x.numel(), torch.float32, x.device)
    halves.copy_(torch.clamp(x, -LARGEST, LARGEST, out=rounded))
    spectrum = _as_complex(bins)
    torch.fft.rfft(rounded.copy_(halves), norm="ortho", out=spectrum)
    torch.abs(spectrum, out=magnitudes)
    return True


def inverse(bins: Tensor, out: Tensor, subtract: bool = False) -> None:
    """``out =`` (or ``out -=``) the vector of these bins."""
    if out.numel():
        vector = torch.fft.irfft(_as_complex(bins), n=out.numel(), norm="ortho")
        out.sub_(vector) if subtract else out.copy_(vector)


def _as_complex(bins: Tensor) -> Tensor:
    return torch.view_as_complex(bins[: bins.numel() // 2 * 2].view(-1, 2))
