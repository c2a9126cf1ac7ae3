"""The predicted step time of every spec on a given network, ranked, and advice whether to compress."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tersegrad.comm.units import show_bytes
from tersegrad.plan.codecs import BucketCost, Network, split
from tersegrad.plan.timeline import Compute, simulate

PLAIN, HALF = ("none", "Dense()"), ("bf16", "fp16", "AllReduce(BF16())", "AllReduce(FP16())")
WORTH = 0.05  # share of the step that a lossier method must save to be recommended
HIDDEN = 0.05  # share by which communication may lengthen the step and still count as hidden


@dataclass(frozen=True)
class Setting:
    """The network, the workers and the computation that predictions are made for."""

    workers: int
    network: Network
    compute: Compute
    contention: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """One spec in one setting; seconds and bytes of one step, on one worker."""

    spec: str
    step: float
    compute: float
    exposed: float  # seconds by which communication and coding lengthen the step
    encode: float
    wait: float
    decode: float
    sent: int
    memory: int

    @property
    def hidden(self) -> bool:
        """Whether communication is hidden behind backward."""
        return self.exposed <= HIDDEN * self.step


def predict(spec: str, costs: Sequence[BucketCost], setting: Setting) -> Prediction:
    """Predict one step, bucket by bucket along the timeline of backward; StepAhead's shift comes before that."""
    ahead = sum(cost.ahead for cost in costs)
    parts = [split(cost, setting.workers, setting.network) for cost in costs]
    step = simulate(setting.compute, [part.service for part in parts], setting.contention)
    return Prediction(
        spec,
        step.seconds + ahead,
        setting.compute.seconds,
        step.exposed + ahead,
        sum(part.encode for part in parts),
        sum(part.wait for part in parts),
        sum(part.decode for part in parts),
        sum(part.sent for part in parts),
        sum(cost.memory for cost in costs),
    )


def rank(costs: Mapping[str, Sequence[BucketCost]], setting: Setting) -> list[Prediction]:
    """The fastest first."""
    return sorted((predict(spec, each, setting) for spec, each in costs.items()), key=lambda p: p.step)


def answer(ranked: Sequence[Prediction]) -> str:
    """Advice, with the reason, in a sentence or two.

    It is the least lossy of float32, half precision and compressed that is within 5 % of the fastest.
    """
    best = ranked[0]
    for specs, name in ((PLAIN, "plain float32"), (HALF, "dense {}")):
        gentle = next((p for p in ranked if p.spec in specs), None)
        if gentle is not None and gentle.step * (1 - WORTH) <= best.step:
            what = name.format(gentle.spec)
            if gentle.hidden:
                return f"Do not compress: {what} already hides behind backward ({_ms(gentle.step)} a step)."
            return f"Do not compress: {what} takes {_ms(gentle.step)} a step, and nothing else is 5 % faster."
    others = [p for p in ranked if p.spec in (*PLAIN, *HALF)]
    against = " and ".join(f"{_ms(p.step)} with {p.spec}" for p in others) or "nothing dense was asked for"
    rest = "" if best.hidden else f" Of that, {_ms(best.exposed)} do not hide behind backward."
    return f"Compress with {best.spec}: {_ms(best.step)} a step, against {against}.{rest}"


def show(ranked: Sequence[Prediction]) -> str:
    """The predictions as a table."""
    width = max(len("spec"), *(len(p.spec) for p in ranked))
    heads = ("step", "compute", "exposed", "encode", "wait", "decode", "sent", "memory")
    lines = [f"{'spec':<{width}} " + " ".join(f"{head:>9}" for head in heads)]
    for p in ranked:
        times = (p.step, p.compute, p.exposed, p.encode, p.wait, p.decode)
        cells = [*(_ms(seconds) for seconds in times), show_bytes(p.sent), show_bytes(p.memory)]
        lines.append(f"{p.spec:<{width}} " + " ".join(f"{cell:>9}" for cell in cells))
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    """Seconds as text in milliseconds.

    >>> _ms(0.01234), _ms(1.5)
    ('12.3 ms', '1500 ms')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{1e3 * seconds:.0f} ms"


def curves(
    costs: Mapping[str, Sequence[BucketCost]], setting: Setting, workers: Sequence[int]
) -> dict[str, list[float]]:
    """Step time by spec, for every number of workers, with the same computation per worker (weak scaling)."""
    return {
        spec: [
            predict(spec, each, Setting(n, setting.network, setting.compute, setting.contention)).step for n in workers
        ]
        for spec, each in costs.items()
    }


def best_by_workers(steps: Mapping[str, Sequence[float]], workers: Sequence[int]) -> list[tuple[int, int, str]]:
    """Ranges of the number of workers, from and to, and the fastest spec in each."""
    spans: list[tuple[int, int, str]] = []
    for place, n in enumerate(workers):
        best = min(steps, key=lambda spec: steps[spec][place])
        if spans and spans[-1][2] == best:
            spans[-1] = (spans[-1][0], n, best)
        else:
            spans.append((n, n, best))
    return spans
