"""QSGD: unbiased random rounding of every element to one of few levels.

Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", NeurIPS 2017.
Body: one float32 scale per bucket, then ceil(bits * n / 8) bytes of codes.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Layout, Paused, Pausing, Payload, State, Traits, mix_seed, param, sections, stage
from tersegrad.kernels.ops import NORMS, QSGD_MAX_SCALE, bucket_count, packed_nbytes

_SCALE_NBYTES = 4


@dataclass(frozen=True, repr=False)
class QSGD(Pausing):
    """Stochastic rounding to 2^(bits-1) - 1 levels on each side of zero, with a scale for every ``bucket`` elements.

    With L levels and a bucket's scale S (its largest magnitude, or its Euclidean norm), the step is S / L and

        decoded = step * (floor(y) + 1 with probability y - floor(y), else floor(y)),   y = x / step

    so that the expectation is x, and the variance of an element at most step^2 / 4.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "QSGD()",
        "QSGD(bits=8, bucket=100)",
        "QSGD(bits=6, bucket=64, norm='l2')",
        "TopK(0.1, values=QSGD(8))",
    )

    bits: int = param(4, "bits per element, sign included, 2 to 16: fewer => fewer bytes, more noise")
    bucket: int = param(512, "elements that share a scale: more => fewer bytes, more noise")
    norm: str = param(
        "max", 'scale of a bucket: "max", its largest magnitude; "l2", its Euclidean norm: more zeros, more noise'
    )

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 16:
            raise ValueError(f"QSGD(bits={self.bits!r}): 2 to 16 bits, of which one is the sign.")
        if type(self.bucket) is not int or self.bucket < 1:
            raise ValueError(f"QSGD(bucket={self.bucket!r}): a bucket has one element or more. The usual is 512.")
        if self.norm not in NORMS:
            raise ValueError(f"QSGD(norm={self.norm!r}): the norms are {', '.join(map(repr, NORMS))}.")

    def traits(self) -> Traits:
        """With few bits the noise can have a larger norm than the vector."""
        return Traits(unbiased=True, contracts=False)

    def init(self, layout: Layout, seed: int) -> State:
        """The seed and the number of encodings so far determine all random draws."""
        return {"seed": seed, "calls": 0}

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        n, kernel = x.numel(), kernels.on(x)
        split = _SCALE_NBYTES * bucket_count(n, self.bucket)
        payload = Payload.empty(split + packed_nbytes(n, self.bits), n, state, x.device)
        scales = payload.body[:split].view(torch.float32)
        (finite,) = yield (kernel.bucket_scales(x, self.bucket, self.norm, scales),)
        if not finite:
            return Payload.nonfinite(n, state, x.device)
        key = mix_seed(state["seed"], state["calls"], n)  # n: buckets split from one share its seed
        kernel.qsgd_encode(x, scales, self.bucket, self.bits, key, payload.body[split:])
        stage(state, calls=state["calls"] + 1)
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * x``; any code is valid, the scales are checked."""
        split = _SCALE_NBYTES * bucket_count(payload.numel, self.bucket)
        expected = split + packed_nbytes(payload.numel, self.bits)
        if payload.body.numel() != expected:
            raise ValueError(f"{payload.numel} elements of {self!r} take {expected} bytes, got {payload.body.numel()}.")
        scales = payload.body[:split].clone().view(torch.float32)  # a copy, as the body may be unaligned
        if not bool(((scales >= 0) & (scales <= QSGD_MAX_SCALE)).all()):
            raise ValueError(f"{self!r}: a scale is from 0 to {QSGD_MAX_SCALE:.4g}; another one was received.")
        kernels.on(acc).qsgd_decode_add(payload.body[split:], scales, self.bucket, self.bits, acc, scale)


@sections.register
def _sections(compressor: QSGD, payload: Payload) -> dict[str, int]:
    if not payload.finite:
        return {}
    split = _SCALE_NBYTES * bucket_count(payload.numel, compressor.bucket)
    return {"scales": split, "codes": payload.body.numel() - split}
