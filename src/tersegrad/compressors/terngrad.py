"""TernGrad: every element as -s, 0 or s, drawn without bias.

Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NeurIPS 2017.
Body: one float32 scale per group, then ceil(n / 5) bytes of digits.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._grouped import grouped_sections, groups_of, numbers_and_codes, read, require_bucket
from tersegrad.core import Layout, Paused, Pausing, Payload, State, Traits, mix_seed, param, sections, stage
from tersegrad.kernels.ops import ternary_nbytes


@dataclass(frozen=True, repr=False)
class TernGrad(Pausing):
    """1.6 bits per element: decoded = s * sign(x) with probability |x| / s, else 0; one s per ``bucket`` elements.

    s is the largest magnitude of the group, but at most ``clip`` times its root mean square; larger elements are
    clipped to s. With ``clip=None`` the expectation is x, and the variance of an element |x| (s - |x|).
    """

    examples: ClassVar[tuple[str, ...]] = ("TernGrad()", "TernGrad(bucket=100, clip=None)")

    bucket: int | None = param(None, "elements that share s: fewer => more bytes, less noise; None: the whole vector")
    clip: float | None = param(2.5, "in root mean squares: lower => less noise, more bias; None: no clipping, no bias")

    def __post_init__(self) -> None:
        require_bucket(self, self.bucket, 1)
        if self.clip is not None and not (type(self.clip) in (int, float) and 1 <= self.clip < math.inf):
            raise ValueError(
                f"TernGrad(clip={self.clip!r}): a number of 1 or more, in units of the root mean square; below, most "
                "elements would be clipped. The paper has 2.5. Write clip=None for none."
            )

    def traits(self) -> Traits:
        """Unbiased if nothing is clipped; the noise can have a larger norm than the vector."""
        return Traits(unbiased=self.clip is None, contracts=False)

    def init(self, layout: Layout, seed: int) -> State:
        """The seed and the number of encodings so far determine all random draws."""
        return {"seed": seed, "calls": 0}

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        n, kernel = x.numel(), kernels.on(x)
        length, count = groups_of(n, self.bucket)
        payload = Payload.empty(4 * count + ternary_nbytes(n), n, state, x.device)
        scales, digits = numbers_and_codes(payload, count)
        (finite,) = yield (kernel.ternary_scales(x, length, math.inf if self.clip is None else self.clip, scales),)
        if not finite:
            return Payload.nonfinite(n, state, x.device)
        key = mix_seed(state["seed"], state["calls"], n)  # n: buckets split from one share its seed
        kernel.ternary_encode(x, scales, length, key, digits)
        stage(state, calls=state["calls"] + 1)
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * s * (digit - 1)``; scales and digits are checked."""
        length, count = groups_of(payload.numel, self.bucket)
        scales, digits = read(self, payload, count, ternary_nbytes(payload.numel))
        if bool((scales < 0).any()):
            raise ValueError(f"{self!r}: a scale must not be negative, got {float(scales.min()):.4g}.")
        kernels.on(acc).ternary_decode_add(digits, scales, length, acc, scale)


@sections.register
def _sections(compressor: TernGrad, payload: Payload) -> dict[str, int]:
    return grouped_sections(payload, groups_of(payload.numel, compressor.bucket)[1], "scales")
