"""Choosing among measured methods. Decisions use agreed numbers only, so all workers decide alike."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tersegrad.comm.numbers import all_gather_floats
from tersegrad.core import Comm

DENSE, MIXED = "dense", "mixed"
HOPELESS = 1.5  # times the fastest: a slower dense is not in the finals
QUIET = 2e-4  # seconds: shorter pauses are the overhead of handing a bucket over


@dataclass(frozen=True)
class Measured:
    """One worker's medians over the steps of a trial, for one bucket; NaN where nothing was measured."""

    encode: float = math.nan  # seconds before the first collective
    wait: float = math.nan  # seconds in collectives
    decode: float = math.nan  # all other seconds
    step: float = math.nan  # seconds from one step's beginning to the next
    slack: float = math.nan  # longest idle time of the worker after this bucket in the same step, seconds
    energy: float = math.nan  # sum of squares of the total
    left: float = math.nan  # sum of squares of the unsent part


@dataclass(frozen=True)
class Trial:
    """The measurements of all workers, combined into one number each."""

    seconds: float  # the method's own time: encode, wait, decode
    wait: float  # of the worker that waited least: the time of the network without that of stragglers
    step: float
    slack: float
    left: float  # share of the energy that was not sent


def agree(measured: Measured, comm: Comm) -> Trial:
    """Combine every worker's numbers into one Trial, the same bits on all workers; one small all-reduce.

    A worker that is early waits for the others, which is not the method's fault: encode and wait are those of the
    worker that waited least. Decoding ends when the slowest worker has decoded.
    """
    return combine([Measured(*row) for row in all_gather_floats(list(vars(measured).values()), comm)])


def combine(workers: Sequence[Measured]) -> Trial:
    """Combine the numbers of several workers; unknown times are infinite.

    >>> combine([Measured(1.0, 2.0, 1.0, 9.0, 0.0, 4.0, 1.0), Measured(1.0, 5.0, 2.0, 9.0, 0.5, 4.0, 3.0)])
    Trial(seconds=5.0, wait=2.0, step=9.0, slack=0.0, left=0.5)
    """
    until = _known([w.encode + w.wait for w in workers])
    decode, wait, step = (_known([getattr(w, key) for w in workers]) for key in ("decode", "wait", "step"))
    slack = _known([w.slack for w in workers])
    energy, left = sum(_known([w.energy for w in workers])), sum(_known([w.left for w in workers]))
    return Trial(
        seconds=min(until) + max(decode) if until and decode else math.inf,
        wait=min(wait, default=math.inf),
        step=statistics.median(step) if step else math.inf,
        slack=min(slack, default=0.0),
        left=left / energy if energy > 0 else 0.0,
    )


def _known(values: list[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def fastest(seconds: Mapping[str, float], margin: float) -> str:
    """The fastest; but an earlier one is kept unless a later one is faster by more than a share ``margin``.

    >>> fastest({"dense": 100.0, "bf16": 96.0, "topk": 94.0}, margin=0.05)
    'topk'
    >>> fastest({"dense": 100.0, "bf16": 96.0}, margin=0.05)
    'dense'
    """
    best, *others = seconds
    for name in others:
        if seconds[name] < (1.0 - margin) * seconds[best]:
            best = name
    return best


def method_for_bucket(trials: Mapping[str, Trial], budget: float, margin: float) -> str:
    """The method for one bucket: dense if that is hidden or as fast, else the fastest within the budget.

    The worker processes the buckets of a step one after the other. If it was idle after this bucket, in the same step,
    the bucket is hidden behind backward: sending it faster would not shorten the step.
    """
    dense = trials.get(DENSE)
    if dense is None or dense.slack > QUIET + margin * dense.seconds:
        return DENSE
    allowed = {name: t.seconds for name, t in trials.items() if name == DENSE or t.left <= budget}
    return fastest(allowed, margin)


def finalists(trials: Mapping[str, Trial], within_budget: Sequence[str], margin: float, most: int = 2) -> list[str]:
    """The plans for the finals, the least lossy first: dense, "mixed", and the ``most`` fastest methods.

    ``trials`` are those of one bucket, but ``step`` is the same for all. ``within_budget`` are the methods that keep
    the budget in every bucket. A method whose trial was not measured (after a restart in its middle) is tried again.
    Dense is left out only if it is slower than ``HOPELESS`` times the fastest.
    """
    left = {name: trials[name].step for name in (DENSE, *within_budget) if name in trials}
    left |= {name: 0.0 for name, step in left.items() if math.isinf(step)}
    best = [DENSE] if left and left.get(DENSE, math.inf) <= HOPELESS * min(left.values()) else []
    first = len(best)
    while left and len(best) < most + first:
        best.append(fastest(left, margin))
        del left[best[-1]]
    return [name for name in (DENSE, MIXED, *within_budget) if name == MIXED or name in best]


def winner(rounds: Mapping[str, Sequence[float]], margin: float) -> str:
    """``fastest`` of plans that took turns; the earlier one is kept unless all three criteria speak against it.

    They are: the median of the rounds' ratios (a slow moment of the machine affects all plans of a round alike), the
    ratio of the medians (a shorter slow moment affects only one of them), and all rounds but at most one in five.

    >>> winner({"dense": [10.0, 30.0, 11.0], "topk": [8.0, 25.0, 8.9]}, margin=0.1)
    'topk'
    >>> winner({"dense": [10.0, 30.0, 11.0], "topk": [9.8, 12.0, 10.7]}, margin=0.1)
    'dense'
    >>> winner({"dense": [24.8, 24.0, 40.0], "topk": [20.0, 29.6, 30.0]}, margin=0.1)
    'dense'
    """
    best, *others = rounds
    median = statistics.median
    for name in others:
        ratios = [b / a for a, b in zip(rounds[best], rounds[name], strict=True) if math.isfinite(b) and a > 0]
        typical = median(rounds[name]) < (1.0 - margin) * median(rounds[best])
        slower = sum(ratio >= 1.0 for ratio in ratios)
        if ratios and typical and median(ratios) < 1.0 - margin and 5 * slower <= len(ratios):
            best = name
    return best


def has_changed(now: float, before: float, factor: float) -> bool:
    """Whether two times differ by a factor; differences within the noise do not count.

    >>> has_changed(0.030, 0.010, 1.5), has_changed(0.00002, 0.00001, 1.5)
    (True, False)
    """
    return abs(now - before) > QUIET and not before / factor <= now <= before * factor


def changes(
    now: Trial,
    usual: Mapping[str, float],
    plan: str,
    method: str,
    trials: Mapping[str, Trial],
    change: float,
    margin: float,
) -> list[str]:
    """Which times differ from the usual ones by the factor ``change``, and so much that another plan may be better.

    If a compressed method waits longer, dense would wait longer still, in proportion to its bytes. And if dense is the
    plan, a faster network or a slower computation only makes it better.
    """
    off = {key for key in usual if has_changed(getattr(now, key), usual[key], change)}
    dense, own = (trials[name].wait if name in trials else math.inf for name in (DENSE, method))
    leverage = dense / own if 0 < own < dense < math.inf else 1.0
    if abs(now.wait - usual["wait"]) * leverage < margin * now.step:
        off -= {"wait"}
    if plan == DENSE:
        off -= {"wait"} if now.wait < usual["wait"] else set()
        off -= {"step"} if now.step > usual["step"] else set()
    return sorted(off, reverse=True)  # the network first
