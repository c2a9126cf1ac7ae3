"""Blockwise: eight bits per element from a fixed map that is finer near zero, and a scale per block.

Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022.
Body: one float32 scale per block, then n bytes of codes.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._grouped import grouped_sections, groups_of, numbers_and_codes, read
from tersegrad.core import Paused, Pausing, Payload, State, Traits, param, sections


@dataclass(frozen=True, repr=False)
class Blockwise(Pausing):
    """The nearest of 256 numbers times the block's largest element; deterministic and stateless.

    The map (``kernels/reference/blockwise.py``) has 64 steps between 10 % of the largest magnitude and the largest
    itself, 32 between 1 % and 10 %, and so on over seven powers of ten. A block's largest element is exact, and no
    other is off by more than 0.0071 of it.
    """

    examples: ClassVar[tuple[str, ...]] = ("Blockwise()", "Blockwise(block=100)")

    block: int = param(2048, "elements that share a scale: fewer => more bytes, finer")

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise ValueError(f"Blockwise(block={self.block!r}): a block has one element or more. The usual is 2048.")

    def traits(self) -> Traits:
        """The error is at most half of the widest step of the map."""
        return Traits(error=0.0072)

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        n, kernel = x.numel(), kernels.on(x)
        _, count = groups_of(n, self.block)
        payload = Payload.empty(4 * count + n, n, state, x.device)
        scales, codes = numbers_and_codes(payload, count)
        (finite,) = yield (kernel.block_scales(x, self.block, scales),)
        if not finite:
            return Payload.nonfinite(n, state, x.device)
        kernel.blockwise_encode(x, scales, self.block, codes)
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * number * s``; any code is valid, the scales are checked."""
        scales, codes = read(self, payload, groups_of(payload.numel, self.block)[1], payload.numel)
        kernels.on(acc).blockwise_decode_add(codes, scales, self.block, acc, scale)


@sections.register
def _sections(compressor: Blockwise, payload: Payload) -> dict[str, int]:
    return grouped_sections(payload, groups_of(payload.numel, compressor.block)[1], "scales")
