"""ScaledSign: the sign of every element, times the mean magnitude.

Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
Body: one float32 mean per group, then ceil(n / 8) bytes of signs.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._grouped import grouped_sections, groups_of, numbers_and_codes, read, require_bucket
from tersegrad.core import Paused, Pausing, Payload, State, param, sections
from tersegrad.kernels.ops import LANES, packed_nbytes


@dataclass(frozen=True, repr=False)
class ScaledSign(Pausing):
    """One bit per element: decoded = mean|x| * sign(x), with a mean for every ``bucket`` elements.

    It is the vector of that form nearest to x: |decoded - x|^2 = |x|^2 - (sum |x|)^2 / n, at most |x|^2 (1 - 1/n).
    Biased: use it with ``ErrorFeedback``. A sign is the float's sign bit: +0 counts as plus, -0 as minus.
    """

    examples: ClassVar[tuple[str, ...]] = ("ScaledSign()", "ScaledSign(bucket=64)")

    bucket: int | None = param(
        None, "elements that share a mean: fewer => more bytes, closer to x; None: the whole vector"
    )

    def __post_init__(self) -> None:
        require_bucket(self, self.bucket, LANES)

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        length, count = groups_of(x.numel(), self.bucket)
        payload = Payload.empty(4 * count + packed_nbytes(x.numel(), 1), x.numel(), state, x.device)
        (finite,) = yield (kernels.on(x).scaled_sign_encode(x, length, *numbers_and_codes(payload, count)),)
        return payload if finite else Payload.nonfinite(x.numel(), state, x.device)

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * mean * sign``; any sign is valid, the means are checked."""
        length, count = groups_of(payload.numel, self.bucket)
        means, signs = read(self, payload, count, packed_nbytes(payload.numel, 1))
        if bool((means < 0).any()):
            raise ValueError(f"{self!r}: a mean magnitude must not be negative, got {float(means.min()):.4g}.")
        values = torch.stack([means, -means], 1).view(-1)
        kernels.on(acc).signs_decode_add(signs, values, length, acc, scale)


@sections.register
def _sections(compressor: ScaledSign, payload: Payload) -> dict[str, int]:
    return grouped_sections(payload, groups_of(payload.numel, compressor.bucket)[1], "means")
