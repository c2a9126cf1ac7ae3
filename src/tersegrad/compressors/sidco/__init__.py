"""SIDCo: the elements above a threshold from a fitted distribution, at the cost of a few passes over memory.

Abdelmoniem et al., "An efficient statistical-based gradient compression technique for distributed training systems",
MLSys 2021.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._sparse import Selection, Sparse
from tersegrad.compressors._threshold import exceeding, largest, largest_of
from tersegrad.compressors.identity import Identity
from tersegrad.compressors.sidco import published, tails
from tersegrad.compressors.sidco.sample import Sample, Tail
from tersegrad.core import Compressor, Layout, Paused, State, param, report, require_fraction, scratch, stage
from tersegrad.kernels.ops import FLOAT32_MAX

LAWS = ("exponential", "gamma", "pareto")
RULES = ("ours", "paper")
ADAPT_EVERY = 5  # steps between two adjustments of the number of stages
TOLERANCE = 0.2  # relative to the target; within it, the number of stages is kept
CAP = 1.0 + TOLERANCE  # times the target: the most that a step sends
FEEDBACK = 0.5  # share of a step's error (in logarithms) that corrects the next goal
REFINEMENTS = 4  # stages that one step may add to those planned
GOAL_RANGE = 20.0  # the goal stays within this factor of the target


@dataclass(frozen=True, repr=False)
class SIDCo(Sparse):
    """Sends the elements above a threshold from a distribution (exponential, gamma, Pareto) fitted to magnitudes.

    Stage 1 fits all n magnitudes and keeps ``first_ratio`` of them. Every later stage m of M fits the excess of the c
    elements above the previous threshold, and all of these stages keep an equal share:

        eta_1 = F^-1(1 - first_ratio),  eta_m = eta_(m-1) + F_m^-1(1 - share_m),  share_m = (ratio n / c)^(1/(M-m+1))

    If every fit is exact, all later shares are the same, and first_ratio times their product is ``ratio``. The count is
    held to the target: by the error of the last step, by more stages in the same step, by a cap and a floor; vectors
    longer than two million elements are sampled. ``rule="paper"`` does none of this (``published.py``).
    """

    examples: ClassVar[tuple[str, ...]] = (
        "SIDCo(0.1)",
        "SIDCo(0.01, law='gamma', stages=2)",
        "SIDCo(0.01, law='pareto', stages=3, values=BF16())",
        "SIDCo(0.05, rule='paper')",
    )

    ratio: float = param(doc="fraction of elements sent on average: lower => fewer bytes, larger residual")
    law: str = param(
        "exponential",
        'of the first stage: "exponential", "gamma" or "pareto"; later stages are Pareto, or exponential if it is',
    )
    stages: int | str = param("adaptive", 'more => a better fit of the tail, one more pass each; or "adaptive"')
    first_ratio: float = param(0.25, "fraction kept by the first of several stages")
    values: Compressor = param(doc="codec of the values sent", factory=Identity)
    rule: str = param("ours", '"paper": as released: fixed shares, no control of the count but by stages')

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "ratio", "1 % is SIDCo(ratio=0.01).")
        if self.rule not in RULES:
            raise ValueError(f"SIDCo(rule={self.rule!r}): the rules are {', '.join(map(repr, RULES))}.")
        require_fraction(self, "first_ratio", "The paper's is 0.25.")
        if self.law not in LAWS:
            raise ValueError(f"SIDCo(law={self.law!r}): the laws are {', '.join(map(repr, LAWS))}.")
        if self.stages != "adaptive" and not (type(self.stages) is int and self.stages >= 1):
            raise ValueError(f'SIDCo(stages={self.stages!r}): give a number from 1 on, or "adaptive".')

    def init(self, layout: Layout, seed: int) -> State:
        first = 1 if self.stages == "adaptive" else self.stages
        return {**super().init(layout, seed), "stages": first, "goal": 1.0, "calls": 0, "achieved": 0.0, "empty": 0}

    def selecting(self, x: Tensor, state: State) -> Paused[Selection | None]:
        """Fit, select, and adjust the controller by the count that passed."""
        if self.rule == "paper":
            return (yield from self._selecting_as_published(x, state))
        target = self.ratio * x.numel()
        if not target:
            return Selection(scratch(state, "chosen", 0, torch.int32, x.device))
        sample = Sample(x, state)
        if not sample.finite:
            return None
        threshold = self.threshold(sample, target * state["goal"], state["stages"])
        fitted = sample.tail(threshold).count
        if self.stages == "adaptive":
            threshold = self._refined(sample, target, threshold)
        chosen = scratch(state, "chosen", math.ceil(2 * CAP * target), torch.int32, x.device)
        (found,) = yield (kernels.on(x).above(x, min(threshold, FLOAT32_MAX), chosen),)
        count = int(found)  # on which all that follows depends
        self._learn(sample, fitted, target, state)
        empty = state["empty"] + (count == 0)
        stage(state, empty=empty)
        report(state, empty=empty)
        cap = math.ceil(CAP * target)
        if count < target / 2 and sample.tail(0.0).count > count:
            return largest(x, max(1, round(target)), state)  # no distribution fits: a constant vector, a few spikes
        if count > chosen.numel():
            return largest(x, cap, state)
        selected = Selection(chosen[:count])
        return selected if count <= cap else (yield from largest_of(selected, x, cap, state))

    def _selecting_as_published(self, x: Tensor, state: State) -> Paused[Selection | None]:
        if not x.numel():
            return Selection(scratch(state, "chosen", 0, torch.int32, x.device))
        found = published.threshold(x, self.ratio, self.first_ratio, self.law, state["stages"], state)
        if found is None:
            return None
        selected = yield from exceeding(x, found, state)
        calls, count = state["calls"] + 1, selected.positions.numel()
        achieved = state["achieved"] + count / max(1, int(self.ratio * x.numel()))
        stages = state["stages"]
        if calls == published.ADAPT_EVERY:
            if self.stages == "adaptive":
                stages = published.adapted(stages, achieved / calls, self.ratio)
            calls, achieved = 0, 0.0
        empty = state["empty"] + (count == 0)
        stage(state, stages=stages, calls=calls, achieved=achieved, empty=empty)
        report(state, empty=empty)
        return selected

    def threshold(self, sample: Sample, goal: float, stages: int) -> float:
        """The magnitude that about ``goal`` elements of the sample exceed."""
        tail = sample.tail(0.0)
        if tail.count <= goal:
            return 0.0
        ratio = goal / tail.count  # zeros are never sent: the distribution is that of the others
        if ratio >= self.first_ratio or stages == 1:
            return self._first(sample, tail, ratio)
        threshold = self._first(sample, tail, self.first_ratio)
        for left in range(stages - 1, 0, -1):
            tail = sample.tail(threshold)
            if tail.count < 2:
                break  # nothing left to fit
            share = min((goal / tail.count) ** (1 / left), 2.0)
            threshold = max(0.0, threshold + self._stage(tail, share))
        return threshold

    def _refined(self, sample: Sample, target: float, threshold: float) -> float:
        """Add stages in the same step while the count is off; the fit of the last tail may also lower the threshold."""
        for _ in range(REFINEMENTS):
            tail = sample.tail(threshold)
            if abs(tail.count / target - 1) <= TOLERANCE / 4:
                break
            if tail.count < 2:
                threshold /= 2
            else:
                share = min(max(target / tail.count, 0.25), 4.0)
                threshold = max(0.0, threshold + self._stage(tail, share))
        return threshold

    def _first(self, sample: Sample, tail: Tail, ratio: float) -> float:
        if self.law == "exponential":
            return tails.exponential(tail.mean, ratio)
        if self.law == "pareto":
            return tails.pareto(tail.mean, tail.variance, ratio)
        return tails.gamma(tail.mean, sample.mean_log(), ratio)

    def _stage(self, tail: Tail, ratio: float) -> float:
        if self.law == "exponential":
            return tails.exponential(tail.mean, ratio)
        return tails.pareto(tail.mean, tail.variance, ratio)

    # ---- the controller -----------------------------------------------------------------------------

    def _learn(self, sample: Sample, count: float, target: float, state: State) -> None:
        """Correct the goal at every step; every few steps, if still off, try one stage more and one less.

        It uses the count that the planned stages alone would have sent, so that extra stages become unnecessary.
        """
        error = math.log(target / max(count, 0.1 * target))
        goal = min(max(state["goal"] * math.exp(FEEDBACK * error), 1 / GOAL_RANGE), GOAL_RANGE)
        calls, achieved = state["calls"] + 1, state["achieved"] + count / target
        stages = state["stages"]
        if calls == ADAPT_EVERY:
            if self.stages == "adaptive" and abs(achieved / calls - 1) > TOLERANCE:
                stages = self._best_stages(sample, target, stages)
                goal = goal if stages == state["stages"] else 1.0
            calls, achieved = 0, 0.0
        stage(state, goal=goal, stages=stages, calls=calls, achieved=achieved)

    def _best_stages(self, sample: Sample, target: float, stages: int) -> int:
        """Of this number of stages, one less and one more: the one closest to the target on this vector."""
        most = max(1, math.ceil(math.log(self.ratio) / math.log(0.5)))

        def miss(candidate: int) -> float:
            count = sample.tail(self.threshold(sample, target, candidate)).count
            return abs(math.log(max(count, 0.1) / target))

        return min((c for c in (stages + 1, stages, stages - 1) if 1 <= c <= most), key=miss)
