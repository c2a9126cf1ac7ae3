"""Natural: every magnitude rounded at random to one of the two powers of two around it.

Horvath et al., "Natural compression for distributed deep learning", 2019.
Body: n bytes of exponents, then ceil(n / 8) bytes of signs.
"""

from dataclasses import dataclass

from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Compressor, Layout, Payload, State, Traits, mix_seed, sections, stage
from tersegrad.kernels.ops import natural_nbytes, packed_nbytes


@dataclass(frozen=True, repr=False)
class Natural(Compressor):
    """Nine bits an element: |x| = 2^e (1 + m) becomes 2^(e + 1) with probability m, else 2^e; no scale, no knob.

    The mean over all draws is x, and the variance of an element at most x^2 / 8. Only at the ends of float32 the mean
    is wrong: from 2^127 on all becomes 2^127, as the next power is not finite; below 2^-126 (denormals) all becomes 0.
    """

    def traits(self) -> Traits:
        """Unbiased between the ends."""
        return Traits(unbiased=True)

    def init(self, layout: Layout, seed: int) -> State:
        """All draws come from the seed and the number of encodings so far."""
        return {"seed": seed, "calls": 0}

    def encode(self, x: Tensor, state: State) -> Payload:
        """Exponents and signs in one pass."""
        n = x.numel()
        payload = Payload.empty(natural_nbytes(n), n, state, x.device)
        key = mix_seed(state["seed"], state["calls"], n)  # n: buckets that were cut out of one have its seed
        if not kernels.on(x).natural_encode(x, key, payload.body):
            return Payload.nonfinite(n, state, x.device)
        stage(state, calls=state["calls"] + 1)
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * x``; any bytes are legal."""
        expected = natural_nbytes(payload.numel)
        if payload.body.numel() != expected:
            raise ValueError(
                f"{payload.numel} elements of {self!r} take {expected} bytes, and {payload.body.numel()} came."
            )
        kernels.on(acc).natural_decode_add(payload.body, acc, scale)


@sections.register
def _sections(compressor: Natural, payload: Payload) -> dict[str, int]:
    if not payload.finite:
        return {}
    return {"exponents": payload.numel, "signs": packed_nbytes(payload.numel, 1)}
