"""From which compression on VGC and FFT pay, by their own papers' formulas, and what compression they have here."""

import math
from collections.abc import Mapping, Sequence

from tersegrad.compressors import FFT
from tersegrad.plan.advice import Prediction, Setting
from tersegrad.plan.codecs import BucketCost
from tersegrad.plan.cost import fft_least_ratio, vgc_break_even
from tersegrad.reducers import VGC
from tersegrad.specs import parse_reducer


def lines(costs: Mapping[str, Sequence[BucketCost]], ranked: Sequence[Prediction], setting: Setting) -> str:
    """A line for each spec with VGC or FFT in it; empty if there is none, or nobody to send to."""
    if setting.workers < 2:
        return ""
    said = [_line(p, costs[p.spec], setting) for p in ranked]
    return "\n".join(line for line in said if line)


def _line(prediction: Prediction, costs: Sequence[BucketCost], setting: Setting) -> str:
    kinds = {type(part) for part in parse_reducer(prediction.spec).walk()}
    plain = 4 * sum(cost.numel for cost in costs)
    has = plain / max(1, sum(nbytes for cost in costs for _, nbytes in cost.messages))
    if VGC in kinds:
        least = vgc_break_even(setting.workers)
        return (
            f"{prediction.spec}: pays with {setting.workers} workers from a compression of {least:.3g} on, if coding "
            f"and latency cost nothing; it has {has:.3g}."
        )
    return _fft(prediction, plain, has, setting) if FFT in kinds else ""


def _fft(prediction: Prediction, plain: int, has: float, setting: Setting) -> str:
    """The paper's rates are of single passes; here all of encoding and decoding is measured as one."""
    rate = setting.network.messages.bandwidth
    passes = 2 * plain / max(prediction.encode + prediction.decode, 1e-12)  # the formula counts each pass twice
    least = fft_least_ratio(rate, change=math.inf, fft=passes, packing=math.inf, selection=math.inf)
    link = "an unlimited link" if rate == math.inf else f"{8e-6 * rate:.4g} Mbit/s"
    if least == math.inf:
        return f"{prediction.spec}: pays at no compression on {link}: coding takes longer than sending float32."
    return (
        f"{prediction.spec}: pays on {link} from a compression of {least:.3g} on, if nothing hides and latency costs "
        f"nothing; it has {has:.3g}."
    )
