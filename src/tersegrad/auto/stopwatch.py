"""State shared by the buckets of one step, and the times that each of them has measured."""

import math
import statistics
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tersegrad.auto.choice import DENSE, Measured, Trial
from tersegrad.comm.metered import Timing
from tersegrad.core import Comm, Layout, State, Step

if TYPE_CHECKING:
    from tersegrad.auto.programme import Turn


class StepClock:
    """Shared by all buckets of a spec over one Comm; one thread starts and finishes them. Never saved.

    The first bucket of a step leads: all buckets follow its position and its decisions.
    """

    def __init__(self) -> None:
        self.position = 0
        self.plan = DENSE
        self.finalists: list[str] = []
        self.again = False  # the trials are to be repeated
        self.rest = 0  # no measurements until this step
        self.trials: dict[int, dict[str, Trial]] = {}  # by bucket
        self._step = -1
        self._seen: list[int] = []  # buckets of this step so far
        self._under_way = 0
        self._idle_since = 0.0
        self._slack: dict[int, float] = {}  # by bucket: the longest pause after it in this step
        self._slack_before: dict[int, float] = {}  # in the step before

    @staticmethod
    def of(comm: Comm, key: int) -> "StepClock":
        """The clock shared by all buckets of a spec (``key`` is its fingerprint) over this Comm."""
        clock: StepClock = comm.shared.setdefault(f"auto {key}", StepClock())
        return clock

    def enter(self, step: Step, state: State, now: float) -> None:
        """A bucket is about to be started."""
        bucket = step.layout.id
        if step.number != self._step or bucket in self._seen:
            self.trials = {known: trials for known, trials in self.trials.items() if known in self._seen}
            self.position, self.plan, self.again = state["position"], state["plan"], False
            self.finalists, self.rest = state["finalists"], state["rest"]
            self._step, self._seen, self._under_way = step.number, [], 0
            self._slack, self._slack_before = {}, self._slack
        elif not self._under_way:
            pause = now - self._idle_since
            self._slack |= {before: max(pause, self._slack.get(before, 0.0)) for before in self._seen}
        self._seen.append(bucket)
        self._under_way += 1

    def leave(self) -> None:
        """A bucket is finished."""
        self._under_way -= 1
        self._idle_since = time.perf_counter()

    def leads(self, layout: Layout) -> bool:
        """Whether this is the first bucket of the step."""
        return self._seen[0] == layout.id

    def within_budget(self, candidates: Iterable[str], own: Mapping[str, Trial], budget: float) -> list[str]:
        """The candidates within the budget in all known buckets, and in the bucket with the trials ``own``."""
        everywhere = [*self.trials.values(), own]
        return [n for n in candidates if all(n in trials and trials[n].left <= budget for trials in everywhere)]

    def slack_before(self, layout: Layout) -> float:
        """The longest pause after this bucket in the step before."""
        return self._slack_before.get(layout.id, 0.0)


def note(state: State, turn: "Turn", timing: Timing, started: float, slack: float, trial: int, window: int) -> None:
    """Store this worker's times, but not of a trial's first step (switching) and last step (measuring energies)."""
    before, state["_started"] = state.get("_started", math.nan), started
    if turn.place == 0 or (turn.since and (turn.since - 1) % window == 0):
        state["_samples"] = []
    if turn.place == 0 or (turn.place is None and not turn.since):
        return
    samples = state.setdefault("_samples", [])
    inner = turn.place is None or turn.place < trial - 1
    times = (timing.encode, timing.wait, timing.decode) if inner else (math.nan,) * 3
    whole = turn.place is None or turn.place > 1  # the previous step belonged to this trial too
    samples.append((*times, *((started - before, slack) if whole else (math.nan, math.nan))))


def medians(state: State, energy: float = math.nan, left: float = math.nan) -> Measured:
    """Medians of the times since the trial or the window began."""
    columns = list(zip(*state.get("_samples", []), strict=True)) or [()] * 5
    known = [[value for value in column if not math.isnan(value)] for column in columns]
    encode, wait, decode, step, slack = (statistics.median(values) if values else math.nan for values in known)
    return Measured(encode, wait, decode, step, slack, energy, left)
