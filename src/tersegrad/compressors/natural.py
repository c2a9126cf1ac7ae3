"""Natural: every magnitude rounded at random to one of the two nearest powers of two.

Horvath et al., "Natural compression for distributed deep learning", 2019.
Body: n bytes of exponents, then ceil(n / 8) bytes of signs.
"""

from dataclasses import dataclass

from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Layout, Paused, Pausing, Payload, State, Traits, mix_seed, sections, stage
from tersegrad.kernels.ops import natural_nbytes, packed_nbytes


@dataclass(frozen=True, repr=False)
class Natural(Pausing):
    """Nine bits per element: |x| = 2^e (1 + m) becomes 2^(e + 1) with probability m, else 2^e; no parameters.

    The expectation is x, and the variance of an element at most x^2 / 8. It is biased only at the ends of the range of
    float32: from 2^127 on everything becomes 2^127, as the next power is not finite; denormals become 0.
    """

    def traits(self) -> Traits:
        """Unbiased except at the ends of the range."""
        return Traits(unbiased=True)

    def init(self, layout: Layout, seed: int) -> State:
        """The seed and the number of encodings so far determine all random draws."""
        return {"seed": seed, "calls": 0}

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        n = x.numel()
        payload = Payload.empty(natural_nbytes(n), n, state, x.device)
        key = mix_seed(state["seed"], state["calls"], n)  # n: buckets split from one share its seed
        (finite,) = yield (kernels.on(x).natural_encode(x, key, payload.body),)
        if not finite:
            return Payload.nonfinite(n, state, x.device)
        stage(state, calls=state["calls"] + 1)
        return payload

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * x``; any bytes are valid."""
        expected = natural_nbytes(payload.numel)
        if payload.body.numel() != expected:
            raise ValueError(f"{payload.numel} elements of {self!r} take {expected} bytes, got {payload.body.numel()}.")
        kernels.on(acc).natural_decode_add(payload.body, acc, scale)


@sections.register
def _sections(compressor: Natural, payload: Payload) -> dict[str, int]:
    if not payload.finite:
        return {}
    return {"exponents": payload.numel, "signs": packed_nbytes(payload.numel, 1)}
