"""RangeFloat: floats of N bits that spend no code outside the range of the vector.

Wang et al., "FFT-based gradient sparsification for the distributed training of deep neural networks", HPDC 2020.
Meta: the layout of the codes (9 bytes). Body: ceil(N * n / 8) bytes of codes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.rangefloat import codes
from tersegrad.core import Layout, Paused, Pausing, Payload, State, param, stage
from tersegrad.kernels.ops import packed_nbytes

TUNE_EVERY = 64  # encodings between two choices of the mantissa
MOVED = 2.0  # change of the largest magnitude, as a factor, that triggers another choice at once
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, repr=False)
class RangeFloat(Pausing):
    """Floats of ``bits`` bits between ``low`` and ``high``, zero included (``codes.py``).

    With m mantissa bits and x within the range, the error of a magnitude from eps on is below 2^-m of it (truncate) or
    at most 2^-(m+1) (nearest); below eps it is at most eps, or eps / 2. Numbers outside the range are clamped.

    The default range is [-max|x|, max|x|] of each vector. The default mantissa is the one with the smallest squared
    error on a sample of the vector. It is chosen on the first vector, and again every 64 vectors or when max|x| has
    changed by a factor of two since.

    ``eps`` is the smallest magnitude above zero. By default it is the smallest for which the codes suffice; a larger
    one leaves codes unused. It takes a given range and mantissa.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "RangeFloat()",
        "RangeFloat(10, mantissa=5, rounding='truncate')",
        "RangeFloat(3)",
        "RangeFloat(6, low=-0.5, high=2.0)",
        "RangeFloat(8, mantissa=3, high=2.0, rounding='truncate', eps=0.125)",
        "TopK(0.1, values=RangeFloat(8))",
    )

    bits: int = param(8, "bits per element, 2 to 16: fewer => fewer bytes, coarser")
    mantissa: int | None = param(None, "bits: more => finer steps over fewer powers of two; None: chosen on a sample")
    low: float | None = param(None, "lower bound; None: -high, or that of each vector")
    high: float | None = param(None, "upper bound; None: -low, or that of each vector")
    rounding: str = param(
        "nearest", '"nearest"; or "truncate", as in the paper: towards zero, which shrinks all magnitudes a little'
    )
    eps: float | None = param(None, "smallest magnitude above zero; None: as small as the codes allow")

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 16:
            raise ValueError(f"RangeFloat(bits={self.bits!r}): 2 to 16 bits. For 32, write Identity().")
        m = self.mantissa
        if m is not None and not (type(m) is int and 0 <= m < self.bits):
            raise ValueError(
                f"RangeFloat(bits={self.bits}, mantissa={m!r}): a mantissa has 0 to {self.bits - 1} of {self.bits} "
                "bits. Leave it out to have it chosen."
            )
        if self.rounding not in ("nearest", "truncate"):
            raise ValueError(f'RangeFloat(rounding={self.rounding!r}): write "nearest" or "truncate".')
        self._check_range()
        if self.eps is not None:
            self._check_eps(self.eps)

    def _check_eps(self, eps: float) -> None:
        ends, m = self._range, self.mantissa
        if ends is None or m is None:
            raise ValueError(
                f"RangeFloat(eps={eps!r}): the codes between eps and the ends are counted beforehand. "
                "Give mantissa and high too, e.g. RangeFloat(8, mantissa=3, high=2.0, eps=0.125)."
            )
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps <= max(-ends[0], ends[1]):
            raise ValueError(
                f"RangeFloat(eps={eps!r}): eps is positive, and within the range from {ends[0]} to {ends[1]}."
            )
        try:
            codes.with_eps(self.bits, m, *ends, eps, self._nearest)
        except ValueError:
            least = codes.fit(self.bits, m, *ends, self._nearest).eps
            raise ValueError(
                f"RangeFloat(bits={self.bits}, mantissa={m}, eps={eps!r}): there are too few codes from there to the "
                f"ends of the range. Write eps={least!r} or more, or leave it out."
            ) from None

    def _check_range(self) -> None:
        for name, end, sign in (("low", self.low, -1), ("high", self.high, 1)):
            if end is None:
                continue
            if isinstance(end, bool) or not isinstance(end, int | float) or not 0 <= sign * end <= _LARGEST:
                raise ValueError(
                    f"RangeFloat({name}={end!r}): low is at most 0, high at least 0, and both are finite float32 "
                    "numbers. Write e.g. low=-1.0, high=1.0."
                )
        if self.low == 0 == self.high or (0 in (self.low, self.high) and None in (self.low, self.high)):
            raise ValueError(
                f"RangeFloat(low={self.low!r}, high={self.high!r}): a range of zero only; an end that is not given is "
                "the opposite of the other. Give both, e.g. low=0.0, high=1.0."
            )

    @property
    def _nearest(self) -> bool:
        return self.rounding == "nearest"

    @property
    def _range(self) -> tuple[float, float] | None:
        """The given range, if any; a missing end is the opposite of the other."""
        low, high = self.low, self.high
        if low is None:
            return None if high is None else (-high, high)
        return low, -low if high is None else high

    def init(self, layout: Layout, seed: int) -> State:
        return {} if self.mantissa is not None else {"mantissa": 0, "calls": 0, "tuned_at": 0.0}

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        """Determine the range and the mantissa unless they are given, then encode."""
        ends, mantissa, largest = self._range, self.mantissa, 0.0
        depends = ends is None or mantissa is None  # the codes depend on a number that the host must know
        if depends:
            (largest,) = yield (kernels.on(x).abs_max(x),)
        if not math.isfinite(largest):
            return Payload.nonfinite(x.numel(), state, x.device)
        ends = ends or (-largest, largest)
        mantissa = (yield from self._chosen(x, ends, largest, state)) if mantissa is None else mantissa
        layout = self._layout(mantissa, ends)
        nbytes, meta = packed_nbytes(x.numel(), self.bits), codes.layout_meta(layout)
        payload = Payload.empty(nbytes, x.numel(), state, x.device, meta)
        finite = codes.encode(x, layout, self._nearest, payload.body)
        if not depends:
            (finite,) = yield (finite,)
        return payload if depends or finite else Payload.nonfinite(x.numel(), state, x.device)

    def _layout(self, mantissa: int, ends: tuple[float, float]) -> codes.Layout:
        if self.eps is None:
            return codes.fit(self.bits, mantissa, *ends, self._nearest)
        return codes.with_eps(self.bits, mantissa, *ends, self.eps, self._nearest)

    def _chosen(self, x: Tensor, ends: tuple[float, float], largest: float, state: State) -> Paused[int]:
        mantissa, calls, tuned_at = state["mantissa"], state["calls"], state["tuned_at"]
        moved = not tuned_at / MOVED <= largest <= tuned_at * MOVED
        if largest and (moved or calls >= TUNE_EVERY):
            mantissa = yield from codes.best_mantissa(x, self.bits, *ends, self._nearest)
            calls, tuned_at = 0, largest
        stage(state, mantissa=mantissa, calls=calls + 1, tuned_at=tuned_at)
        return int(mantissa)

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc += scale * x``; any code is valid, the layout is checked."""
        codes.decode_add(codes.read_layout(payload.meta, self.bits), payload.body, acc, scale)
