"""Auto's programme: whose turn it is in a step, and why a plan was chosen."""

import math
import statistics
from dataclasses import dataclass

from tersegrad.auto.choice import DENSE, Trial
from tersegrad.core import State

FINALS = 5  # rounds in which the finalists take turns, so that a slow moment of the machine hits all of them


@dataclass(frozen=True)
class Turn:
    """Whose trial it is, and in which step of it; or how many steps it is since the choice."""

    name: str  # "" after the choice
    place: int | None
    final: int | None = None  # which of the finals
    since: int | None = None


@dataclass(frozen=True)
class Programme:
    """``warmup`` dense steps; then trials of ``trial`` steps each, dense and every candidate; then finals."""

    candidates: list[str]
    warmup: int
    trial: int

    @property
    def finals_begin(self) -> int:
        """The position of the first final."""
        return self.warmup + self.trial * (1 + len(self.candidates))

    def turn(self, position: int, finalists: list[str]) -> Turn:
        """Where the programme is."""
        trial, place = divmod(position - self.warmup, self.trial)
        if trial < 0:
            return Turn(DENSE, None)
        order = [DENSE, *self.candidates, *FINALS * finalists]
        if trial < len(order):
            final = trial - 1 - len(self.candidates)
            return Turn(order[trial], place, final=final if final >= 0 else None)
        return Turn("", None, since=position - self.warmup - len(order) * self.trial)


def trials_in(state: State) -> dict[str, Trial]:
    """The trials that a state holds."""
    return {name: Trial(**numbers) for name, numbers in state["trials"].items()}


def rounds_of(finalists: list[str], steps: dict[str, float]) -> dict[str, list[float]]:
    """The steps of every finalist, round by round; infinite where there is none."""
    count = len(finalists)
    return {
        name: [steps.get(str(i), math.inf) for i in range(place, FINALS * count, count)]
        for place, name in enumerate(finalists)
    }


def reason(plan: str, trials: dict[str, Trial], finals: dict[str, list[float]]) -> str:
    """Why, in a line: what a step takes with each, the last measurement counting."""
    steps = {name: trial.step for name, trial in trials.items()}
    steps |= {name: statistics.median(rounds) for name, rounds in finals.items()}
    others = ", ".join(f"{name} {1e3 * step:.1f}" for name, step in steps.items() if name != plan)
    return f"{plan} from here on, {1e3 * steps[plan]:.1f} ms a step ({others})"
