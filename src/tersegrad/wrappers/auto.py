"""Auto: tries several methods during training, and goes on with the fastest; again when the network changes."""

import logging
import math
import statistics
import time
import weakref
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import state as states
from tersegrad.compressors import BF16, RangeFloat, TopK
from tersegrad.core import Bucket, Comm, Reducer, State, later, require, require_fraction, spare
from tersegrad.plan.choice import (
    DENSE,
    MIXED,
    Measured,
    Trial,
    agree,
    finalists,
    has_changed,
    method_for_bucket,
    winner,
)
from tersegrad.reducers import AllGather, AllReduce, Dense, PowerSGD, TwoShot
from tersegrad.taps import Metered
from tersegrad.wrappers.memory import refuse_memory, with_residual

FINALS = 5  # rounds in which the finalists take turns, so that a slow moment of the machine hits all of them
REST = 4  # windows without a look after one in which all was as usual, where the plan is dense
PATIENCE = 2  # windows in a row that must be off before the trials begin anew

_log = logging.getLogger("tersegrad")


def _usual() -> dict[str, Reducer]:
    largest = TopK(0.03, values=RangeFloat(bits=4))  # as topk4: fewer bytes than 1 % in float32, and less is late
    return {
        "bf16": AllReduce(BF16()),
        "topk": AllGather(largest),
        "powersgd": PowerSGD(rank=2),
        "twoshot": TwoShot(largest),
    }


@dataclass(frozen=True, repr=False)
class Auto(Reducer):
    """Dense at first; then every candidate for a few steps; then what made the step shortest, bucket by bucket.

    total = residual + gradient; the method of the moment sends of the total what it sends; the rest is the residual.
    The residual is Auto's own, so a change of method loses nothing. Where all is dense there is none.

    The program, counted in steps that are kept: ``warmup`` dense steps; trials of ``trial`` steps each, dense and every
    candidate; finals, in which the best take turns, and with them "mixed", where each bucket does what was fastest for
    it (dense where dense is hidden behind backward). Then the plan with the shortest step is kept. Every ``window``
    steps the time in collectives and the step time are compared with what they were at first; if they differ by a
    factor of ``change`` twice in a row, the trials are made again. All workers decide alike: of medians that were
    exchanged.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "Auto()",
        "Auto({'topk': AllGather(TopK(0.1))}, warmup=1, trial=3, budget=1e-9)",  # never within budget: back to dense
        "Auto({'bf16': AllReduce(BF16()), 'topk': AllGather(TopK(0.1))}, warmup=1, trial=3)",
    )
    remembers: ClassVar[bool] = True

    candidates: dict[str, Reducer] = field(default_factory=_usual)  # the gentlest first: a later one must be faster
    budget: float = 1.0  # share of the gradient's energy that may stay behind in a step; lower => only gentle methods
    margin: float = 0.05  # how much faster a method must be than one before it, dense being the first of all
    warmup: int = 4  # dense steps before the trials; DDP cuts its buckets anew in the first three
    trial: int = 5  # steps a candidate is tried; more => less noise, longer trials
    window: int = 50  # steps of one look at whether anything has changed; longer => calmer, later to notice
    change: float = 1.5  # by what factor times must differ to try again; lower => more restless

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
            raise ValueError("Auto({}): there is nothing to choose from. Leave the candidates out for the usual ones.")
        require_fraction(self, "budget", "1.0 allows everything that sends anything at all.")
        if not 0 <= self.margin < 1 or not self.change > 1:
            raise ValueError(
                f"Auto(margin={self.margin!r}, change={self.change!r}): a margin is a share below 1, and a change is "
                "a factor above 1."
            )
        for name, least in (("warmup", 0), ("trial", 3), ("window", 1)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise ValueError(f"Auto({name}={value!r}): a whole number of steps, at least {least}.")

    @property
    def conserves(self) -> bool:
        """If all candidates do."""
        return all(reducer.conserves for reducer in self.candidates.values())

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Nothing is known, nothing is late. All candidates' states, so that a saved one finds its place."""
        return {
            "position": 0,  # steps of the program so far
            "plan": DENSE,
            "pick": DENSE,  # this bucket's method in the plan "mixed"
            "finalists": [],
            "late": False,  # False: the residual is zero, on all workers
            "strikes": 0,  # windows in a row that were off
            "rest": 0,  # until this step nothing is looked at
            "residual": torch.zeros(bucket.numel),
            "trials": {},
            "finals": {},  # seconds of a step in each; the first bucket's, for all
            "usual": {},  # the first window after the choice
            "methods": {f"method {name}": r.init(bucket, comm) for name, r in self.candidates.items()},
        }

    def plain(self, state: State, step: int) -> bool:
        """Between two looks, where all is dense and nothing is late."""
        return state["plan"] == DENSE and not state["late"] and step < state["rest"]

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """By the method whose turn it is, with the clock running."""
        started = time.perf_counter()
        board = _board(comm, self, state)
        board.enter(bucket, state, started)
        if board.leads(bucket) and not board.finalists and board.position >= self._finals_begin:
            board.finalists = finalists(_trials(state), self._within_budget(board, state), self.margin)
        turn = self._turn(board)
        last = turn.place == self.trial - 1
        metered = Metered(comm)
        metered.begin(bucket.id)
        energy, left = self._send(self._method(turn, board, state), bucket, x, out, state, metered, weigh=last)
        metered.end()
        self._note(state, turn, metered, started, board.slack_before(bucket))
        later(state, position=board.position + 1, plan=board.plan, finalists=board.finalists)
        if last and turn.final is None:
            self._end_trial(turn, bucket, state, comm, board, self._medians(state, energy, left))
        elif last:
            self._end_final(turn, bucket, state, comm, board)
        elif turn.name == "":
            self._watch(turn, bucket, state, comm, board)
        if board.again:
            later(state, position=self.warmup, finalists=[], usual={}, strikes=0)
        later(state, rest=board.rest)
        board.leave()

    def waiting(self, bucket: Bucket, state: State) -> Tensor | None:
        """The residual, if anything is in it."""
        return state["residual"] if state["late"] else None

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """The residual goes out; candidates remember nothing."""
        out.add_(state["residual"])
        later(state, residual=spare(state, "residual").zero_(), late=False)

    # ---- the program -----------------------------------------------------------------------------

    @property
    def _finals_begin(self) -> int:
        return self.warmup + self.trial * (1 + len(self.candidates))

    def _turn(self, board: "_Board") -> "_Turn":
        """Where the program is."""
        trial, place = divmod(board.position - self.warmup, self.trial)
        if trial < 0:
            return _Turn(DENSE, None)
        program = [DENSE, *self.candidates, *FINALS * board.finalists]
        if trial < len(program):
            final = trial - 1 - len(self.candidates)
            return _Turn(program[trial], place, final=final if final >= 0 else None)
        return _Turn("", None, since=board.position - self.warmup - len(program) * self.trial)

    def _method(self, turn: "_Turn", board: "_Board", state: State) -> str:
        name = turn.name or board.plan
        method: str = state["pick"] if name == MIXED else name
        over_budget = not turn.name and state["trials"].get(method, {}).get("left", 0.0) > self.budget
        return DENSE if over_budget else method

    def _send(
        self, name: str, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm, weigh: bool
    ) -> tuple[float, float]:
        """One step of a method around the residual; returns the energy before and what was left of it, if asked."""
        if name == DENSE and not state["late"]:
            Dense().reduce(bucket, x, out, {}, comm)
            state.pop("_spare_residual", None)  # not needed before the next trials
            return 1.0, 0.0
        total = with_residual(x, state)
        energy = _energy(total) if weigh else math.nan
        if name == DENSE:
            Dense().reduce(bucket, total, out, {}, comm)
        else:
            self.candidates[name].reduce(bucket, total, out, state["methods"][f"method {name}"], comm)
        later(state, residual=total, late=name != DENSE)
        if out is not x:
            x.zero_()  # all of it is sent or remembered
        return energy, _energy(total) if weigh else math.nan

    # ---- measuring -------------------------------------------------------------------------------

    def _note(self, state: State, turn: "_Turn", metered: Metered, started: float, slack: float) -> None:
        """Keeps this worker's times. The first step of a trial still pays for the change, and the last is weighed."""
        before, state["_started"] = state.get("_started", math.nan), started
        if turn.place == 0 or (turn.since and (turn.since - 1) % self.window == 0):
            state["_samples"] = []
        if turn.place == 0 or (turn.place is None and not turn.since):
            return
        samples = state.setdefault("_samples", [])
        timing, inner = metered.timing, turn.place is None or turn.place < self.trial - 1
        times = (timing.encode, timing.wait, timing.decode) if inner else (math.nan,) * 3
        whole = turn.place is None or turn.place > 1  # the step before was of this trial too
        samples.append((*times, *((started - before, slack) if whole else (math.nan, math.nan))))

    @staticmethod
    def _medians(state: State, energy: float = math.nan, left: float = math.nan) -> Measured:
        columns = list(zip(*state.get("_samples", []), strict=True)) or [()] * 5
        known = [[value for value in column if not math.isnan(value)] for column in columns]
        encode, wait, decode, step, slack = (statistics.median(values) if values else math.nan for values in known)
        return Measured(encode, wait, decode, step, slack, energy, left)

    def _end_trial(
        self, turn: "_Turn", bucket: Bucket, state: State, comm: Comm, board: "_Board", measured: Measured
    ) -> None:
        """Exchanges the trial's numbers, and picks what is best for this bucket as far as is known."""
        trials = {**state["trials"], turn.name: asdict(agree(measured, comm))}
        board.trials[bucket.id] = known = _trials({"trials": trials})
        later(state, trials=trials, pick=method_for_bucket(known, self.budget, self.margin))

    def _end_final(self, turn: "_Turn", bucket: Bucket, state: State, comm: Comm, board: "_Board") -> None:
        """The first bucket of the step keeps the time of a step, and after the last final chooses for all."""
        assert turn.final is not None
        over = turn.final == FINALS * len(board.finalists) - 1
        if board.leads(bucket):
            before = state["finals"] if turn.final else {}
            rounds = {**before, str(turn.final): agree(self._medians(state), comm).step}
            later(state, finals=rounds)
            if over:
                steps = _rounds(board.finalists, rounds)
                board.plan = winner(steps, self.margin)
                self._tell(comm, bucket, _reason(board.plan, _trials(state), steps))
        if over:
            later(state, plan=board.plan)
            self._give_back(state, board.plan)

    @staticmethod
    def _give_back(state: State, plan: str) -> None:
        """Methods that are not in use give their buffers back."""
        kept = f"method {state['pick'] if plan == MIXED else plan}"
        for name, inner in state["methods"].items():
            if name != kept:
                states.drop_scratch(inner)

    def _within_budget(self, board: "_Board", state: State) -> list[str]:
        """The candidates that keep the budget in all buckets that are known."""
        everywhere = [*board.trials.values(), _trials(state)]
        return [
            n for n in self.candidates if all(n in trials and trials[n].left <= self.budget for trials in everywhere)
        ]

    # ---- watching --------------------------------------------------------------------------------

    def _watch(self, turn: "_Turn", bucket: Bucket, state: State, comm: Comm, board: "_Board") -> None:
        """Once a window the first bucket of the step looks whether times are still what they were."""
        if not board.leads(bucket) or not turn.since or turn.since % self.window:
            return
        now = agree(self._medians(state), comm)
        usual = state["usual"]
        if not usual:
            later(state, usual={"wait": now.wait, "step": now.step})
            board.rest = bucket.step + 1 + REST * self.window
            return
        off = self._changes(now, usual, board.plan, self._method(turn, board, state), _trials(state))
        strikes = state["strikes"] + 1 if off else 0
        later(state, strikes=strikes)
        if not strikes:
            board.rest = bucket.step + 1 + REST * self.window
        if strikes >= PATIENCE:
            board.again = True
            what = {"wait": "waiting for others", "step": "a step"}[off[0]]
            times = f"{1e3 * getattr(now, off[0]):.1f} ms, and {1e3 * usual[off[0]]:.1f} when {board.plan} was chosen"
            self._tell(comm, bucket, f"all is tried again, because {what} takes {times}")

    def _changes(
        self, now: Trial, usual: dict[str, float], plan: str, method: str, trials: dict[str, Trial]
    ) -> list[str]:
        """What differs from what it was by a factor, and by so much that another plan may be better.

        If this method waits so much longer, dense would wait longer still, as many times as it sends more. And where
        dense is the plan, a faster network or a slower computation only make it better.
        """
        off = {key for key in usual if has_changed(getattr(now, key), usual[key], self.change)}
        dense, own = (trials[name].wait if name in trials else math.inf for name in (DENSE, method))
        leverage = dense / own if 0 < own < dense < math.inf else 1.0
        if abs(now.wait - usual["wait"]) * leverage < self.margin * now.step:
            off -= {"wait"}
        if plan == DENSE:
            off -= {"wait"} if now.wait < usual["wait"] else set()
            off -= {"step"} if now.step > usual["step"] else set()
        return sorted(off, reverse=True)  # the network first

    @staticmethod
    def _tell(comm: Comm, bucket: Bucket, text: str) -> None:
        if comm.rank == 0:
            _log.info("auto, step %d: %s", bucket.step, text)


@dataclass(frozen=True)
class _Turn:
    """Where the program is: whose trial, and in which step of it; or how many steps since the choice."""

    name: str  # "" after the choice
    place: int | None
    final: int | None = None  # which of the finals
    since: int | None = None


class _Board:
    """What the buckets of one step know of each other. All are reduced by one thread, one after the other.

    The first bucket of a step leads: its position is that of all, and what it decides is for all. Never saved.
    """

    def __init__(self) -> None:
        self.position = 0
        self.plan = DENSE
        self.finalists: list[str] = []
        self.again = False  # the trials shall begin anew
        self.rest = 0  # until this step nothing is looked at
        self.trials: dict[int, dict[str, Trial]] = {}  # by bucket
        self._step = -1
        self._seen: list[int] = []  # buckets of this step so far
        self._ended = 0.0
        self._slack: dict[int, float] = {}  # by bucket: the longest pause after it in this step
        self._slack_before: dict[int, float] = {}  # in the step before

    def enter(self, bucket: Bucket, state: State, now: float) -> None:
        """A bucket's turn begins."""
        if bucket.step != self._step or bucket.id in self._seen:
            self.trials = {known: trials for known, trials in self.trials.items() if known in self._seen}
            self.position, self.plan, self.again = state["position"], state["plan"], False
            self.finalists, self.rest = state["finalists"], state["rest"]
            self._step, self._seen = bucket.step, []
            self._slack, self._slack_before = {}, self._slack
        else:
            pause = now - self._ended
            self._slack |= {before: max(pause, self._slack.get(before, 0.0)) for before in self._seen}
        self._seen.append(bucket.id)

    def leave(self) -> None:
        """It ends."""
        self._ended = time.perf_counter()

    def leads(self, bucket: Bucket) -> bool:
        """Whether it is the first of the step."""
        return self._seen[0] == bucket.id

    def slack_before(self, bucket: Bucket) -> float:
        """The longest pause after this bucket in the step before."""
        return self._slack_before.get(bucket.id, 0.0)


_boards: "weakref.WeakKeyDictionary[Comm, dict[int, _Board]]" = weakref.WeakKeyDictionary()


def _board(comm: Comm, spec: Auto, state: State) -> _Board:
    """The one that all buckets of this spec on this Comm share."""
    if "_key" not in state:
        state["_key"] = spec.fingerprint()
    return _boards.setdefault(comm, {}).setdefault(state["_key"], _Board())


def _rounds(finalists: list[str], steps: dict[str, float]) -> dict[str, list[float]]:
    """The steps of every finalist, round by round; infinite where there is none."""
    count = len(finalists)
    return {
        name: [steps.get(str(i), math.inf) for i in range(place, FINALS * count, count)]
        for place, name in enumerate(finalists)
    }


def _reason(plan: str, trials: dict[str, Trial], finals: dict[str, list[float]]) -> str:
    """Why, in a line: what a step takes with each, the last measurement counting."""
    steps = {name: trial.step for name, trial in trials.items()}
    steps |= {name: statistics.median(rounds) for name, rounds in finals.items()}
    others = ", ".join(f"{name} {1e3 * step:.1f}" for name, step in steps.items() if name != plan)
    return f"{plan} from here on, {1e3 * steps[plan]:.1f} ms a step ({others})"


def _trials(state: State) -> dict[str, Trial]:
    return {name: Trial(**numbers) for name, numbers in state["trials"].items()}


def _energy(x: Tensor) -> float:
    """The sum of squares."""
    return float(x.norm()) ** 2
