"""Auto, the reducer: runs the current method with a residual of its own, and decides what comes next."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from tersegrad.auto.choice import (
    DENSE,
    MIXED,
    Measured,
    Trial,
    changes,
    finalists,
    method_for_bucket,
    winner,
)
from tersegrad.auto.decisions import Decisions
from tersegrad.auto.programme import FINALS, Programme, Turn, reason, rounds_of, trials_in
from tersegrad.auto.stopwatch import StepClock, medians, note
from tersegrad.comm.metered import Metered
from tersegrad.compressors import BF16, RangeFloat, TopK
from tersegrad.core import (
    Comm,
    Finish,
    Layout,
    Memory,
    Reducer,
    State,
    Step,
    Vector,
    added,
    contribution,
    param,
    phases,
    refuse_memory,
    require,
    require_fraction,
    stage,
)
from tersegrad.core import state as states
from tersegrad.reducers import AllGather, AllReduce, Dense, PowerSGD, TwoShot
from tersegrad.wrappers.error_feedback import ErrorFeedback

REST = 4  # windows without measurements after an unchanged one, if the plan is dense
PATIENCE = 2  # consecutive windows that must differ before the trials are repeated

_log = logging.getLogger("tersegrad")


def _usual() -> dict[str, Reducer]:
    largest = TopK(0.03, values=RangeFloat(bits=4))  # as topk4: fewer bytes than 1 % in float32, and a smaller residual
    return {
        "bf16": AllReduce(BF16()),
        "topk": AllGather(largest),
        "powersgd": PowerSGD(rank=2),
        "twoshot": TwoShot(largest),
    }


@dataclass(frozen=True, repr=False)
class Auto(Memory):
    """Measures dense and every candidate during training, then keeps what made the step shortest, bucket by bucket.

    total = residual + gradient; the current method sends a part of the total, and the rest is the residual. The
    residual is Auto's own, so a change of method loses nothing. While everything is dense there is none.

    The programme, in committed steps: ``warmup`` dense steps; trials of ``trial`` steps each, of dense and every
    candidate; finals, in which the best take turns, including "mixed", in which each bucket uses the method that was
    fastest for it (dense if dense is hidden behind backward). The plan with the shortest step is kept. Every ``window``
    steps the time in collectives and the step time are compared with those of the first window; if they differ by a
    factor of ``change`` twice in a row, the trials are repeated. All workers decide alike, on all-reduced medians.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "Auto()",
        "Auto({'topk': AllGather(TopK(0.1))}, warmup=1, trial=3, budget=1e-9)",  # never within budget: back to dense
        "Auto({'bf16': AllReduce(BF16()), 'topk': AllGather(TopK(0.1))}, warmup=1, trial=3)",
    )

    candidates: dict[str, Reducer] = param(doc="the least lossy first: a later one must be faster", factory=_usual)
    budget: float = param(
        1.0, "share of the gradient's energy that may stay unsent in a step; lower => less lossy methods"
    )
    margin: float = param(0.05, "how much faster a method must be than an earlier one; dense is the first")
    warmup: int = param(4, "dense steps before the trials; DDP rebuilds its buckets in the first three")
    trial: int = param(5, "steps a candidate is tried; more => less noise, longer trials")
    window: int = param(50, "steps between two checks for changes; longer => less noise, slower to react")
    change: float = param(1.5, "factor by which times must differ to try again; lower => more often")

    def __post_init__(self) -> None:
        require(self, "candidates", dict, "Write e.g. Auto({'bf16': AllReduce(BF16())}).")
        for name, reducer in self.candidates.items():
            good = isinstance(name, str) and name[:1].isalpha() and name not in (DENSE, MIXED, "names")
            if not good or not isinstance(reducer, Reducer):
                raise TypeError(
                    f"Auto: {name!r}: {reducer!r} is not a candidate. A candidate is a reducer under a name that "
                    f"begins with a letter and is neither {DENSE!r} nor {MIXED!r}, e.g. 'bf16': AllReduce(BF16())."
                )
            refuse_memory(self, reducer)
        if not self.candidates:
            raise ValueError("Auto({}): there is nothing to choose from. Omit the candidates to use the default ones.")
        require_fraction(self, "budget", "1.0 allows everything that sends anything at all.")
        if not 0 <= self.margin < 1 or not self.change > 1:
            raise ValueError(
                f"Auto(margin={self.margin!r}, change={self.change!r}): a margin is a share below 1, and a change is "
                "a factor above 1."
            )
        for name, least in (("warmup", 0), ("trial", 3), ("window", 1)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise ValueError(f"Auto({name}={value!r}): a whole number of steps, at least {least}.")

    def loses(self, workers: int) -> float:
        """The loss of the candidate that loses most."""
        return max(reducer.loses(workers) for reducer in self.candidates.values())

    @cached_property
    def programme(self) -> Programme:
        """The order of trials and finals."""
        return Programme(list(self.candidates), self.warmup, self.trial)

    def init(self, layout: Layout, comm: Comm) -> State:
        """No measurements and no residual; the states of all candidates, so that saved ones can be loaded."""
        return {
            "position": 0,  # steps of the programme so far
            "plan": DENSE,
            "pick": DENSE,  # this bucket's method in the plan "mixed"
            "finalists": [],
            "late": False,  # False: the residual is zero, on all workers
            "strikes": 0,  # consecutive windows with changed times
            "rest": 0,  # no measurements until this step
            "residual": layout.zeros(),
            "trials": {},
            "finals": {},  # step time in each, in seconds; kept by the first bucket for all
            "usual": {},  # times of the first window after the choice
            "methods": {f"method {name}": r.init(layout, comm) for name, r in self.candidates.items()},
        }

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """The residual; None if it is zero on all workers."""
        return state["residual"] if state["late"] else None

    def clear(self, layout: Layout, state: State) -> None:
        """Stage a residual of zeros; candidates have none."""
        stage(state, residual=states.back_buffer(state, "residual").zero_(), late=False)

    def active(self, state: State | None, number: int) -> Reducer:
        """Dense between two measurements, if the plan is dense and the residual is zero."""
        return Dense() if state is not None and self._rests(state, number) else self

    @staticmethod
    def _rests(state: State, number: int) -> bool:
        return state["plan"] == DENSE and not state["late"] and number < state["rest"]

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Run the current method and measure its times.

        A step at whose end workers combine their measurements finishes at once, as it sends them at its end: it is not
        overlapped with other buckets.
        """
        if self._rests(state, step.number):
            return Dense().start(step, x, out, {}, comm)
        started, layout = time.perf_counter(), step.layout
        clock = StepClock.of(comm, self.fingerprint())
        clock.enter(step, state, started)
        if clock.leads(layout) and not clock.finalists and clock.position >= self.programme.finals_begin:
            known = trials_in(state)
            allowed = clock.within_budget(self.candidates, known, self.budget)
            clock.finalists = finalists(known, allowed, self.margin)
        turn = self.programme.turn(clock.position, clock.finalists)
        last = turn.place == self.trial - 1
        metered = Metered(comm)
        metered.begin(layout.id)
        method = _Method(self, self._method(turn, clock, state), weigh=last)
        finish_method = method.start(step, added(x), out, state, metered)
        span = metered.pause()

        def finish() -> bool | None:
            metered.resume(span)
            finite = finish_method()
            metered.end()
            note(state, turn, metered.timing, started, clock.slack_before(layout), self.trial, self.window)
            clock.leave()
            return finite

        stage(state, position=clock.position + 1, plan=clock.plan, finalists=clock.finalists)
        if last or self._looks(turn, layout, clock):
            finite = finish()
            self._decide(turn, layout, state, comm, clock, method, step.number)
            finish = _known(finite)
        if clock.again:
            stage(state, position=self.warmup, finalists=[], usual={}, strikes=0)
        stage(state, rest=clock.rest)
        return finish

    def _method(self, turn: Turn, clock: StepClock, state: State) -> str:
        name = turn.name or clock.plan
        method: str = state["pick"] if name == MIXED else name
        over_budget = not turn.name and state["trials"].get(method, {}).get("left", 0.0) > self.budget
        return DENSE if over_budget else method

    def _looks(self, turn: Turn, layout: Layout, clock: StepClock) -> bool:
        """Whether, after the choice, this bucket compares its times with the usual ones."""
        due = turn.since is not None and turn.since > 0 and turn.since % self.window == 0
        return due and turn.name == "" and clock.leads(layout)

    # ---- decisions, on combined measurements ------------------------------------------------------

    def _decide(
        self,
        turn: Turn,
        layout: Layout,
        state: State,
        comm: Comm,
        clock: StepClock,
        method: "_Method",
        number: int,
    ) -> None:
        agree = _agreement(comm, number, layout, state)
        if turn.name == "":
            self._watch(agree, state, comm, clock, self._method(turn, clock, state), number)
        elif turn.final is None:
            trials = {**state["trials"], turn.name: asdict(agree(medians(state, method.energy, method.left)))}
            clock.trials[layout.id] = known = trials_in({"trials": trials})
            stage(state, trials=trials, pick=method_for_bucket(known, self.budget, self.margin))
        else:
            self._end_final(turn.final, agree, layout, state, comm, clock, number)

    def _end_final(
        self, final: int, agree: "Agree", layout: Layout, state: State, comm: Comm, clock: StepClock, number: int
    ) -> None:
        """The first bucket of the step stores the step time, and after the last final chooses for all."""
        over = final == FINALS * len(clock.finalists) - 1
        if clock.leads(layout):
            before = state["finals"] if final else {}
            rounds = {**before, str(final): agree(medians(state)).step}
            stage(state, finals=rounds)
            if over:
                steps = rounds_of(clock.finalists, rounds)
                clock.plan = winner(steps, self.margin)
                _tell(comm, number, reason(clock.plan, trials_in(state), steps))
        if over:
            stage(state, plan=clock.plan)
            _free_others(state, clock.plan)

    def _watch(self, agree: "Agree", state: State, comm: Comm, clock: StepClock, method: str, number: int) -> None:
        """Once per window the first bucket of the step compares the times with the usual ones."""
        now = agree(medians(state))
        usual = state["usual"]
        if not usual:
            stage(state, usual={"wait": now.wait, "step": now.step})
            clock.rest = number + 1 + REST * self.window
            return
        off = changes(now, usual, clock.plan, method, trials_in(state), self.change, self.margin)
        strikes = state["strikes"] + 1 if off else 0
        stage(state, strikes=strikes)
        if not strikes:
            clock.rest = number + 1 + REST * self.window
        if strikes >= PATIENCE:
            clock.again = True
            what = {"wait": "waiting for others", "step": "a step"}[off[0]]
            times = f"{1e3 * getattr(now, off[0]):.1f} ms, and {1e3 * usual[off[0]]:.1f} when {clock.plan} was chosen"
            _tell(comm, number, f"all is tried again, because {what} takes {times}")


Agree = Callable[[Measured], Trial]


def _agreement(comm: Comm, number: int, layout: Layout, state: State) -> Agree:
    return lambda measured: Decisions.of(comm).agree(measured, comm, number, layout.id, state["usual"])


class _Method:
    """One step of one method with Auto's residual; measures energies if asked to."""

    def __init__(self, auto: Auto, name: str, weigh: bool):
        self.auto, self.name, self.weigh = auto, name, weigh
        self.energy = self.left = math.nan  # sums of squares of the total, and of its unsent part

    def start(self, step: Step, x: Tensor, out: Tensor, state: State, comm: Comm) -> Finish:
        if self.name == DENSE and not state["late"]:
            states.free_back_buffer(state, "residual")  # it is not needed before the next trials
            self.energy, self.left = 1.0, 0.0
            return Dense().start(step, x, out, {}, comm)
        total = self.auto._total(step, x, state)
        if self.weigh:
            self.energy = _energy(total.add())
        vector = total.total if self.weigh else total
        reducer = Dense() if self.name == DENSE else self.auto.candidates[self.name]
        memory = {} if self.name == DENSE else state["methods"][f"method {self.name}"]
        finish_method = reducer.start(step, vector, out, memory, comm)

        def finish() -> bool | None:
            finite = finish_method()
            self.auto._hold(step, total)
            # Where tensors may be idle, what is remembered of them is not sent; all workers must decide alike.
            stage(state, residual=total.total, late=self.name != DENSE or step.idle is not None)
            if out is not x:
                x.zero_()  # all of it was sent or is in the residual
            if self.weigh:
                self.left = _energy(total.total)
            return finite

        return finish


def _known(finite: bool | None) -> Finish:
    return lambda: finite


def _free_others(state: State, plan: str) -> None:
    """Free the buffers of methods that are not in use."""
    kept = f"method {state['pick'] if plan == MIXED else plan}"
    for name, inner in state["methods"].items():
        if name != kept:
            states.drop_scratch(inner)


def _tell(comm: Comm, number: int, text: str) -> None:
    if comm.rank == 0:
        _log.info("auto, step %d: %s", number, text)


def _energy(x: Tensor) -> float:
    """The sum of squares."""
    return float(x.norm()) ** 2


@contribution.register
def _contribution(reducer: Auto, layout: Layout, state: State, x: Tensor, workers: int) -> Tensor:
    return x


@phases.register
def _phases(reducer: Auto) -> list[Reducer]:
    """Every candidate, with a residual."""
    return [phase for candidate in reducer.candidates.values() for phase in phases(ErrorFeedback(candidate))]
