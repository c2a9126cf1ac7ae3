"""Results of runs, read from JSON lines, and the comparison of several runs.

A folder holds one ``*.jsonl`` file per run of ``tersegrad train`` or ``tersegrad simulate``, and perhaps a
``map.json``. The first line of a run is ``start``, then come ``step`` and ``eval`` lines, and ``end`` is the last. A
run without ``end`` is unfinished: it was interrupted, or is still running. Its last line may be incomplete; it is then
ignored.

Seconds and bytes are totals since the start of training, of one worker. The seconds of a simulated run are predicted,
and None if no network was given.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from tersegrad.lab.until import Until

BASELINE = "none"  # the spec that all others are compared with
METRICS = {"accuracy": True, "perplexity": False}  # is higher better? For files that do not say so
SIMULATED = "simulated"
NETWORKS = ("netns", "throttled", "none", SIMULATED)
MAP_FILE = "map.json"
_OF_ONE_RUN = ("spec", "expression", "seed", "weights", "first batch", "optimizer", "decisions")


@dataclass(frozen=True)
class Setting:
    """What runs must have in common to be compared."""

    workload: str
    metric: str
    higher_is_better: bool
    workers: int
    bandwidth: str | None
    latency: str | None
    network: str
    batch: int | None  # None: a simulated workload that does not say
    kernel_latency: bool = False  # the kernel delayed the packets; otherwise latency is emulated
    learning_rate: float | None = None  # None: the workload's own
    steps: int | None = None  # planned, of simulated runs; runs of ``train`` may differ, as with --seconds
    until: str | None = None  # what ended simulated runs early, e.g. "accuracy >= 0.9"
    identity: tuple[
        tuple[str, str], ...
    ] = ()  # what else decides the results of simulated runs, of whatever spec and seed

    @property
    def simulated(self) -> bool:
        """Whether all workers were in one process, so that times are predicted."""
        return self.network == SIMULATED

    @property
    def sign(self) -> int:
        """1 if a higher score is better, otherwise -1."""
        return 1 if self.higher_is_better else -1

    @property
    def goal(self) -> float | None:
        """The score in ``until``; None if there is none, or if ``until`` is about something else.

        >>> Setting("digits", "accuracy", True, 4, None, None, SIMULATED, None, until="accuracy >= 0.9").goal
        0.9
        """
        if self.until is None:
            return None
        try:
            until = Until.parse(self.until)
        except ValueError:
            return None
        return until.value if until.metric == self.metric else None


@dataclass(frozen=True)
class Step:
    """One ``step`` line. None is what was not measured, or not predicted."""

    step: int
    seconds: float | None
    loss: float
    sent: float | None
    encode: float | None
    wait: float | None
    decode: float | None
    density: float | None
    waiting: float | None  # share of the gradient's energy that is in residuals


@dataclass(frozen=True)
class Score:
    """One ``eval`` or ``end`` line. A score of null is read as NaN."""

    step: int
    seconds: float | None
    score: float
    sent: float | None


@dataclass(frozen=True)
class Reached:
    """When a run first reached a score."""

    seconds: float | None
    sent: float | None
    bound: bool  # at the first evaluation already, so these are upper bounds


@dataclass(frozen=True)
class Run:
    """One run, as read from its file."""

    file: str
    spec: str
    expression: str
    setting: Setting
    seed: int
    parameters: int
    planned: int  # steps
    compute: float | None  # seconds of one step without communication; None: a simulation without it
    command: str
    environment: tuple[tuple[str, str], ...]
    identity: tuple[tuple[str, str], ...]  # all that decides the result of a simulated run
    time: str
    steps: tuple[Step, ...]
    evals: tuple[Score, ...]
    end: Score | None
    because: str | None  # why a simulated run ended: "steps", "until" or "diverged"
    wall: float | None  # seconds that a simulation has taken so far

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.end is not None

    @property
    def last_step(self) -> int:
        """The number of steps so far."""
        return max([*(s.step for s in self.steps), *(s.step for s in self.curve)], default=0)

    @property
    def seconds(self) -> float | None:
        """Training time so far; predicted if the run is simulated."""
        return _latest(*(s.seconds for s in self.steps), *(s.seconds for s in self.curve))

    @property
    def sent(self) -> float | None:
        """Bytes sent so far; None if they were not counted."""
        return _latest(*(s.sent for s in self.steps), *(s.sent for s in self.curve))

    @cached_property
    def curve(self) -> tuple[Score, ...]:
        """All evaluations in order, the one at the end included."""
        if self.end is None:
            return self.evals
        return (*(e for e in self.evals if e.step < self.end.step), self.end)

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step; predicted if the run is simulated."""
        return None if self.end is None or self.end.seconds is None else self.end.seconds / max(1, self.end.step)

    @property
    def step_sent(self) -> float | None:
        """Mean number of bytes sent in a step."""
        return None if self.end is None or self.end.sent is None else self.end.sent / max(1, self.end.step)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by phase, as far as measured. Encode, wait and decode overlap with compute."""
        if self.compute is None or self.setting.simulated:
            return {}
        last = self.steps[-1] if self.steps else None
        if last is not None and last.encode is not None and last.wait is not None and last.decode is not None:
            spent = {"encode": last.encode, "wait": last.wait, "decode": last.decode}
            return {"compute": self.compute} | {part: seconds / last.step for part, seconds in spent.items()}
        rest = {} if self.step_seconds is None else {"not split": max(0.0, self.step_seconds - self.compute)}
        return {"compute": self.compute} | rest

    @cached_property
    def diverged(self) -> int | None:
        """The step from which loss or score was never finite again; None if the run did not diverge.

        The loss is looked at too, because the accuracy of a network full of NaN is a finite number.
        """
        if self.because == "diverged" and self.end is not None:
            return self.end.step
        losses = [(s.step, s.loss) for s in self.steps]
        scores = [(s.step, s.score) for s in self.curve] if self.evals else []  # no evaluation: a score of null is none
        return min((step for marks in (losses, scores) if (step := _lost(marks)) is not None), default=None)

    @property
    def worst_drop(self) -> float | None:
        """How far the score was behind the best one before it, at most; None with fewer than two scores."""
        scores = [self.setting.sign * p.score for p in self.curve if math.isfinite(p.score)]
        if len(scores) < 2:
            return None
        return max(best - score for best, score in zip(accumulate(scores, max), scores, strict=True))

    @property
    def waiting(self) -> float | None:
        """Share of the gradient's energy that is in residuals, mean over the last half of the run."""
        late = [s.waiting for s in self.steps if s.waiting is not None and 2 * s.step > self.last_step]
        return statistics.fmean(late) if late else None

    def reach(self, target: float) -> Reached | None:
        """When the score first was as good as ``target``, interpolated linearly between evaluations."""
        sign = self.setting.sign
        points = [p for p in self.curve if math.isfinite(p.score)]
        if points and sign * points[0].score >= sign * target:
            return Reached(points[0].seconds, points[0].sent, bound=True)
        for a, b in pairwise(points):
            if sign * b.score >= sign * target:
                part = (target - a.score) / (b.score - a.score)
                return Reached(_between(a.seconds, b.seconds, part), _between(a.sent, b.sent, part), bound=False)
        return None


def _latest(*totals: float | None) -> float | None:
    """The largest of the known values of something that only grows."""
    return max((total for total in totals if total is not None), default=None)


def _between(a: float | None, b: float | None, part: float) -> float | None:
    return None if a is None or b is None else a + part * (b - a)


def _lost(marks: Sequence[tuple[int, float]]) -> int | None:
    """The step from which no value is finite."""
    step = None
    for at, value in reversed(marks):
        if math.isfinite(value):
            break
        step = at
    return step


@dataclass(frozen=True)
class Cell:
    """One step time in the map. ``ratio`` is this time divided by the baseline's at the same bandwidth."""

    spec: str
    bandwidth: str | None
    ms: float
    ratio: float


@dataclass(frozen=True)
class Map:
    """Where compression wins: step times by spec and bandwidth."""

    workload: str
    workers: int
    baseline: str
    cells: tuple[Cell, ...]
    command: str


@dataclass(frozen=True)
class Results:
    """All results in a folder."""

    runs: tuple[Run, ...]
    stubs: tuple[str, ...]  # files without a complete first line
    map: Map | None


# ---- several runs together -----------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """Median and range of one number over seeds."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Iterable[float | None]) -> "Spread | None":
        """The spread of the finite values; None if there are none."""
        known = [v for v in values if v is not None and math.isfinite(v)]
        return Spread(statistics.median(known), min(known), max(known), len(known)) if known else None

    def scaled(self, factor: float) -> "Spread":
        """The same spread in another unit."""
        return Spread(factor * self.median, factor * self.low, factor * self.high, self.count)


@dataclass(frozen=True)
class Group:
    """All runs of one spec in one setting, usually one per seed."""

    name: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        """The finished runs: the only ones whose numbers count."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def unfinished(self) -> tuple[Run, ...]:
        """The unfinished runs, which are drawn but not counted."""
        return tuple(run for run in self.runs if not run.finished)

    @cached_property
    def sound(self) -> tuple[Run, ...]:
        """The finished runs that did not diverge: the only ones whose scores count."""
        return tuple(run for run in self.finished if run.diverged is None)

    @property
    def diverged(self) -> tuple[Run, ...]:
        """The finished runs that diverged."""
        return tuple(run for run in self.finished if run.diverged is not None)

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """The spread of a value over the finished runs."""
        return Spread.of(value(run) for run in self.finished)

    def sound_spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """The spread of a value over the finished runs that did not diverge."""
        return Spread.of(value(run) for run in self.sound)

    @property
    def parts(self) -> dict[str, Spread]:
        """Seconds of a step by phase."""
        names = dict.fromkeys(part for run in self.finished for part in run.parts)
        spreads = {part: Spread.of(run.parts.get(part) for run in self.finished) for part in names}
        return {part: spread for part, spread in spreads.items() if spread is not None}


@dataclass(frozen=True)
class Comparison:
    """All specs of one setting: the baseline first, then in the order in which they were run."""

    setting: Setting
    groups: tuple[Group, ...]
    replaced: tuple[Run, ...] = ()  # simulated runs that were made again later, with another result

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, spec by spec."""
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def baseline(self) -> Group | None:
        """The uncompressed runs; None unless one of them is finished."""
        return next((g for g in self.groups if g.finished and g.finished[0].spec == BASELINE), None)

    @cached_property
    def setter(self) -> Run | None:
        """The run whose final score is the target: the worst of those that are finished and did not fail."""
        if self.setting.goal is not None:
            return None
        sign, floor = self.setting.sign, self.floor
        ends = {run: sign * run.end.score for g in self.groups for run in g.sound if run.end}
        good = [run for run, end in ends.items() if math.isfinite(end) and (floor is None or end >= sign * floor)]
        return min(good, key=lambda run: ends[run], default=None)

    @cached_property
    def floor(self) -> float | None:
        """The score halfway between the baseline's first and last one. Simulated runs that end worse have failed.

        Without it, one spec that learns nothing would make a target that all others reach at once.
        """
        if not self.setting.simulated or self.baseline is None:
            return None
        curves = [[p.score for p in run.curve if math.isfinite(p.score)] for run in self.baseline.sound]
        first, last = Spread.of(c[0] for c in curves if c), Spread.of(c[-1] for c in curves if c)
        return None if first is None or last is None else (first.median + last.median) / 2

    @cached_property
    def target(self) -> float | None:
        """The score at which times and bytes are compared: that of ``until``, or else one that all runs reached."""
        if self.setting.goal is not None:
            return self.setting.goal
        return None if self.setter is None or self.setter.end is None else self.setter.end.score

    @property
    def shows_target(self) -> bool:
        """Whether the target matters: there are times to compare at it, or it is what runs were to reach."""
        return self.target is not None and (self.timed or self.setting.goal is not None)

    @cached_property
    def timed(self) -> bool:
        """Whether any time is known, measured or predicted."""
        return any(run.seconds is not None for run in self.runs)

    @cached_property
    def percent(self) -> bool:
        """Whether scores are fractions that are shown in percent."""
        scores = [p.score for run in self.runs for p in run.curve if math.isfinite(p.score)]
        return self.setting.metric.lower().endswith("accuracy") and all(0 <= score <= 1 for score in scores)

    @property
    def differences(self) -> dict[str, tuple[str, ...]]:
        """What differs between simulated runs and is explained neither by the spec nor by the seed, with its values."""
        found = {}
        keys = dict.fromkeys(key for run in self.runs for key, _ in run.identity)
        for key in (key for key in keys if key not in ("spec", "expression", "seed")):
            values = [(run.spec, run.seed, dict(run.identity).get(key, "")) for run in self.runs]
            by_spec, by_seed = (
                {(spec, value) for spec, _, value in values},
                {(seed, value) for _, seed, value in values},
            )
            if len(by_spec) > len({s for s, _ in by_spec}) and len(by_seed) > len({s for s, _ in by_seed}):
                found[key] = tuple(dict.fromkeys(value for _, _, value in values))
        return found


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """One comparison per setting. Of several simulated runs of one spec and seed, the last finished one is taken."""
    ordered = sorted(runs, key=lambda run: (run.time, run.file))
    last = {(run.setting, run.spec, run.expression, run.seed): run for run in ordered if run.finished}
    settings: dict[Setting, dict[tuple[str, str], list[Run]]] = {}
    replaced: dict[Setting, list[Run]] = {}
    for run in ordered:
        newer = last.get((run.setting, run.spec, run.expression, run.seed))
        if run.setting.simulated and newer is not None and newer is not run and newer.time >= run.time:
            replaced.setdefault(run.setting, []).append(run)
        else:
            settings.setdefault(run.setting, {}).setdefault((run.spec, run.expression), []).append(run)
    return [Comparison(s, _groups(by_spec), tuple(replaced.get(s, ()))) for s, by_spec in settings.items()]


def _groups(by_spec: dict[tuple[str, str], list[Run]]) -> tuple[Group, ...]:
    specs = [spec for spec, _ in by_spec]
    groups = [  # a preset whose expression has changed between runs is two specs
        Group(spec if specs.count(spec) == 1 else f"{spec} = {expression}", tuple(runs))
        for (spec, expression), runs in by_spec.items()
    ]
    return tuple(sorted(groups, key=lambda group: group.runs[0].spec != BASELINE))


# ---- reading -------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Results:
    """All runs in a folder, and its map."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Name the one that was --out of `tersegrad train` or `simulate`.")
    paths = sorted(folder.glob("*.jsonl"))
    found = {path.name: read_run(path) for path in paths}
    runs = tuple(run for run in found.values() if run is not None)
    map_path = folder / MAP_FILE
    map_ = read_map(map_path) if map_path.exists() else None
    if not runs and map_ is None:
        why = f"its {len(paths)} .jsonl file(s) have no complete first line" if paths else "no .jsonl file"
        made = f"`tersegrad train --out {folder}`, or `tersegrad simulate` with the same option"
        raise ValueError(f"{folder} has no runs to report: {why}. Make some with {made}.")
    return Results(runs, tuple(name for name, run in found.items() if run is None), map_)


def read_run(path: Path) -> Run | None:
    """One file; None if its first line is incomplete."""
    lines = list(_lines(path))
    if not lines:
        return None
    start, *rest = lines
    if start.event != "start":
        raise start.error(f"is {start.event!r}, but a run begins with 'start'. Is this another kind of file?")
    environment = start.table("environment", "a table of versions")
    setting = _setting(start)
    simulated = setting.simulated
    steps, evals, end, because = [], [], None, None
    for line in rest:
        if end is not None:
            raise line.error("comes after 'end'. One file is one run: write the next one elsewhere.")
        if line.event == "step":
            steps.append(_step(line, simulated))
        elif line.event == "eval":
            evals.append(_score(line, simulated))
        elif line.event == "end":
            end, because = _score(line, simulated), line.optional_text("because")
        else:
            raise line.error(f"is {line.event!r}; known here are 'step', 'eval' and 'end'. Is it from a newer version?")
    return Run(
        file=path.name,
        spec=start.text("spec"),
        expression=start.text("expression"),
        setting=setting,
        seed=start.count("seed", least=0),
        parameters=start.count("parameters"),
        planned=start.count("steps"),
        compute=_compute(start, simulated),
        command=start.text("command"),
        environment=environment,
        identity=_identity(start) if simulated else (),
        time=start.text("time"),
        steps=tuple(steps),
        evals=tuple(evals),
        end=end,
        because=because,
        wall=_latest(*(line.known("wall") for line in rest)),
    )


def read_map(path: Path) -> Map:
    """``map.json``."""
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). Make it again.") from None
    whole = _Line(str(path), fields if isinstance(fields, dict) else {})
    listed = whole.fields.get("cells")
    if not isinstance(listed, list) or not listed:
        raise whole.error("needs 'cells', a list with at least one of them. Make it again.")
    cells = read_cells(listed, str(path))
    return Map(
        workload=whole.text("workload"),
        workers=whole.count("workers"),
        baseline=whole.text("baseline"),
        cells=cells,
        command=str(whole.fields.get("command") or ""),
    )


def read_cells(rows: Sequence[object], where: str = "map") -> tuple[Cell, ...]:
    """The cells of a map, in the form they have in ``map.json``."""
    return tuple(_cell(_Line(f"{where}, cell {i},", r if isinstance(r, dict) else {})) for i, r in enumerate(rows, 1))


@dataclass(frozen=True)
class _Line:
    """The fields of one line, and where it stands, for messages."""

    where: str
    fields: dict[str, Any]

    @property
    def event(self) -> str:
        return str(self.fields.get("event"))

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.where} {problem}")

    def number(self, key: str) -> float:
        value = self.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"has {key} = {value!r}, which is not a number. Mend the line, or move the file away.")
        return float(value)

    def known(self, key: str) -> float | None:
        return None if self.fields.get(key) is None else self.number(key)

    def count(self, key: str, least: int = 1) -> int:
        value = self.number(key)
        if not (value >= least and value.is_integer()):
            raise self.error(f"has {key} = {value:g}, which is not a whole number of at least {least}. Mend the line.")
        return int(value)

    def text(self, key: str) -> str:
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise self.error(f"has {key} = {value!r}, which is not a text. Mend the line, or move the file away.")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.fields.get(key) is None else self.text(key)

    def table(self, key: str, what: str) -> tuple[tuple[str, str], ...]:
        value = self.fields.get(key)
        if not isinstance(value, dict):
            raise self.error(f"has no {key}, {what}. Mend the line, or move the file away.")
        return tuple((str(name), _plain(entry)) for name, entry in value.items())

    def choice(self, key: str, choices: Iterable[str]) -> str:
        value = self.text(key)
        if value not in choices:
            raise self.error(f"has {key} = {value!r}, which is unknown. It may be {', '.join(choices)}.")
        return value


def _lines(path: Path) -> Iterator[_Line]:
    """The lines of a file. The last one may lack its line break; if it is not whole either, it is left out."""
    whole, _, tail = path.read_bytes().rpartition(b"\n")
    for number, text in enumerate(whole.split(b"\n") if whole else [], 1):
        if text.strip():
            yield _line(f"{path}, line {number},", text)
    try:
        last = json.loads(tail)
    except ValueError:
        return  # the run was interrupted while it wrote this line
    if isinstance(last, dict):
        yield _Line(f"{path}, last line,", last)


def _line(where: str, text: bytes) -> _Line:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}). Mend the line, or move the file away.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is not a JSON object. Mend the line, or move the file away.")
    return _Line(where, fields)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _setting(start: _Line) -> Setting:
    network = start.choice("network", NETWORKS)
    simulated = network == SIMULATED
    return Setting(
        workload=start.text("workload"),
        metric=start.text("metric"),
        higher_is_better=_higher_is_better(start),
        workers=start.count("workers"),
        bandwidth=start.optional_text("bandwidth"),
        latency=start.optional_text("latency"),
        network=network,
        batch=None if simulated and start.fields.get("batch") is None else start.count("batch"),
        kernel_latency=start.fields.get("kernel_latency") is True,
        learning_rate=start.known("learning_rate"),
        steps=start.count("steps") if simulated else None,
        until=start.optional_text("until") if simulated else None,
        identity=tuple(item for item in _identity(start) if item[0] not in _OF_ONE_RUN) if simulated else (),
    )


def _identity(start: _Line) -> tuple[tuple[str, str], ...]:
    return start.table("identity", "a table of all that decides the result")


def _higher_is_better(start: _Line) -> bool:
    value = start.fields.get("higher_is_better")
    if value is None:
        metric = start.text("metric")
        if metric not in METRICS:
            known = " and ".join(METRICS)
            raise start.error(f"has metric = {metric!r} and no higher_is_better, which only {known} can do without.")
        return METRICS[metric]
    if not isinstance(value, bool):
        raise start.error(f"has higher_is_better = {value!r}, which is neither true nor false. Mend the line.")
    return value


def _compute(start: _Line, simulated: bool) -> float | None:
    ms = start.known("compute_ms") if simulated else start.number("compute_ms")
    return None if ms is None else ms / 1000


def _seconds(line: _Line, simulated: bool) -> float | None:
    return line.known("seconds") if simulated else line.number("seconds")


def _step(line: _Line, simulated: bool) -> Step:
    loss = line.known("loss")
    return Step(
        step=line.count("step"),
        seconds=_seconds(line, simulated),
        loss=math.nan if loss is None else loss,
        sent=line.known("sent"),
        encode=line.known("encode"),
        wait=line.known("wait"),
        decode=line.known("decode"),
        density=line.known("density"),
        waiting=line.known("waiting"),
    )


def _score(line: _Line, simulated: bool) -> Score:
    score = line.known("score")
    return Score(
        step=line.count("step", least=0 if simulated or line.event == "eval" else 1),
        seconds=_seconds(line, simulated),
        score=math.nan if score is None else score,
        sent=line.known("sent"),
    )


def _cell(line: _Line) -> Cell:
    ratio = line.number("ratio")
    if not (ratio > 0 and math.isfinite(ratio)):
        raise line.error(f"has ratio = {ratio:g}; times have a ratio above 0. Make the map again.")
    bandwidth = None if line.fields.get("bandwidth") is None else line.text("bandwidth")
    return Cell(line.text("spec"), bandwidth, line.number("ms"), ratio)
