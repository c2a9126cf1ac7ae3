"""Auto's programme: which method runs in a step, and why a plan was chosen."""

import math
import statistics
from dataclasses import dataclass

from tersegrad.auto.choice import DENSE, Trial
from tersegrad.core import State

FINALS = 5  # rounds in which the finalists take turns, so that a slow moment of the machine affects all of them


@dataclass(frozen=True)
class Turn:
    """The method on trial and the step of its trial; or the number of steps since the choice."""

    name: str  # "" after the choice
    place: int | None
    final: int | None = None  # number of the final
    since: int | None = None


@dataclass(frozen=True)
class Programme:
    """``warmup`` dense steps; then trials of ``trial`` steps each, dense and every candidate; then finals."""

    candidates: list[str]
    warmup: int
    trial: int

    @property
    def finals_begin(self) -> int:
        """The position of the first step of the finals."""
        return self.warmup + self.trial * (1 + len(self.candidates))

    def turn(self, position: int, finalists: list[str]) -> Turn:
        """The turn at a position of the programme."""
        trial, place = divmod(position - self.warmup, self.trial)
        if trial < 0:
            return Turn(DENSE, None)
        order = [DENSE, *self.candidates, *FINALS * finalists]
        if trial < len(order):
            final = trial - 1 - len(self.candidates)
            return Turn(order[trial], place, final=final if final >= 0 else None)
        return Turn("", None, since=position - self.warmup - len(order) * self.trial)


def trials_in(state: State) -> dict[str, Trial]:
    """The trials that are stored in a state."""
    return {name: Trial(**numbers) for name, numbers in state["trials"].items()}


def rounds_of(finalists: list[str], steps: dict[str, float]) -> dict[str, list[float]]:
    """The step times of every finalist, round by round; infinite if not measured."""
    count = len(finalists)
    return {
        name: [steps.get(str(i), math.inf) for i in range(place, FINALS * count, count)]
        for place, name in enumerate(finalists)
    }


def reason(plan: str, trials: dict[str, Trial], finals: dict[str, list[float]]) -> str:
    """The reason for a choice in one line: the latest measured step time of each method."""
    steps = {name: trial.step for name, trial in trials.items()}
    steps |= {name: statistics.median(rounds) for name, rounds in finals.items()}
    others = ", ".join(f"{name} {1e3 * step:.1f}" for name, step in steps.items() if name != plan)
    return f"{plan} from here on, {1e3 * steps[plan]:.1f} ms a step ({others})"
