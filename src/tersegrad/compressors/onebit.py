"""OneBit: the sign of every element, decoded as the mean of the elements with that sign.

Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
DNNs", Interspeech 2014. Body: two float32 means per group, then ceil(n / 8) bytes of signs.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._grouped import grouped_sections, groups_of, numbers_and_codes, read, require_bucket
from tersegrad.core import Paused, Pausing, Payload, State, param, sections
from tersegrad.kernels.ops import LANES, packed_nbytes


@dataclass(frozen=True, repr=False)
class OneBit(Pausing):
    """One bit per element: decoded = the mean of the non-negative elements of its group, or of the negative ones.

    These two numbers per group minimise the squared error, and preserve the sum of every group. Biased: use it with
    ``ErrorFeedback``. A sign is the float's sign bit: +0 counts as plus, -0 as minus.
    """

    examples: ClassVar[tuple[str, ...]] = ("OneBit()", "OneBit(bucket=None)")

    bucket: int | None = param(
        1024, "elements that share two means: fewer => more bytes, closer to x; None: the whole vector"
    )

    def __post_init__(self) -> None:
        require_bucket(self, self.bucket, LANES)

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        length, count = groups_of(x.numel(), self.bucket)
        payload = Payload.empty(8 * count + packed_nbytes(x.numel(), 1), x.numel(), state, x.device)
        (finite,) = yield (kernels.on(x).one_bit_encode(x, length, *numbers_and_codes(payload, 2 * count)),)
        return payload if finite else Payload.nonfinite(x.numel(), state, x.device)

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * mean``; any sign is valid, the means are checked."""
        length, count = groups_of(payload.numel, self.bucket)
        means, signs = read(self, payload, 2 * count, packed_nbytes(payload.numel, 1))
        if bool((means[0::2] < 0).any()) or bool((means[1::2] > 0).any()):
            raise ValueError(f"{self!r}: a group has one mean >= 0 and one mean <= 0; others were received.")
        kernels.on(acc).signs_decode_add(signs, means, length, acc, scale)


@sections.register
def _sections(compressor: OneBit, payload: Payload) -> dict[str, int]:
    return grouped_sections(payload, 2 * groups_of(payload.numel, compressor.bucket)[1], "means")
