"""Results of training runs: JSON lines into frozen records, and what several runs say together.

A folder holds one ``*.jsonl`` file per run, and perhaps a ``map.json``. The first line of a run is its ``start``; then
come ``step`` and ``eval`` lines; ``end`` is the last. A run without ``end`` is unfinished: it was cut off, or it still
runs. Its last line may then be half written, and is ignored. Seconds and bytes are cumulative, and those of one worker.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

BASELINE = "none"  # the spec that ratios refer to
METRICS = {"accuracy": True, "perplexity": False}  # is more better?
NETWORKS = ("netns", "throttled", "none")
MAP_FILE = "map.json"


@dataclass(frozen=True)
class Setting:
    """What two runs must share to be compared."""

    workload: str
    metric: str
    workers: int
    bandwidth: str | None
    latency: str | None
    network: str
    batch: int
    kernel_latency: bool = False  # the latency was the kernel's own work, not emulated
    learning_rate: float | None = None  # None: the workload's own

    @property
    def more_is_better(self) -> bool:
        """True for accuracy, False for perplexity."""
        return METRICS[self.metric]


@dataclass(frozen=True)
class Step:
    """One ``step`` line. The last four are None where the run had no hook of ours; ``sent``, where nobody counted."""

    step: int
    seconds: float
    loss: float
    sent: float | None
    encode: float | None
    wait: float | None
    decode: float | None
    density: float | None


@dataclass(frozen=True)
class Score:
    """One ``eval`` or ``end`` line. A score that is null is NaN: nothing was evaluated."""

    step: int
    seconds: float
    score: float
    sent: float | None


@dataclass(frozen=True)
class Reached:
    """When a run first had a score."""

    seconds: float
    sent: float | None
    bound: bool  # the first evaluation was already there, so it came at this moment or sooner


@dataclass(frozen=True)
class Run:
    """One training run, as read from its file."""

    file: str
    spec: str
    expression: str
    setting: Setting
    seed: int
    parameters: int
    planned: int  # steps
    compute: float  # seconds of one step with no communication
    command: str
    environment: tuple[tuple[str, str], ...]
    time: str
    steps: tuple[Step, ...]
    evals: tuple[Score, ...]
    end: Score | None

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.end is not None

    @property
    def last_step(self) -> int:
        """The number of steps so far."""
        return max([*(s.step for s in self.steps), *(s.step for s in self.curve)], default=0)

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return max([*(s.seconds for s in self.steps), *(s.seconds for s in self.curve)], default=0.0)

    @property
    def sent(self) -> float | None:
        """Bytes sent so far; None if they were not counted."""
        counts = [*(s.sent for s in self.steps), *(s.sent for s in self.curve)]
        return max((count for count in counts if count is not None), default=None)

    @property
    def curve(self) -> tuple[Score, ...]:
        """Evaluations in their order; the end is the last of them."""
        if self.end is None:
            return self.evals
        return (*(e for e in self.evals if e.step < self.end.step), self.end)

    @property
    def step_seconds(self) -> float | None:
        """Measured time of one step: the whole run's seconds by its steps."""
        return None if self.end is None else self.end.seconds / self.end.step

    @property
    def step_sent(self) -> float | None:
        """Bytes of one step."""
        return None if self.end is None or self.end.sent is None else self.end.sent / self.end.step

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by phase, as far as known. Only compute does not overlap with the others."""
        last = self.steps[-1] if self.steps else None
        if last is not None and last.encode is not None and last.wait is not None and last.decode is not None:
            spent = {"encode": last.encode, "wait": last.wait, "decode": last.decode}
            return {"compute": self.compute} | {part: seconds / last.step for part, seconds in spent.items()}
        rest = {} if self.step_seconds is None else {"not split": max(0.0, self.step_seconds - self.compute)}
        return {"compute": self.compute} | rest

    def reach(self, target: float) -> Reached | None:
        """When the score first was as good as ``target``, by straight lines between evaluations."""
        sign = 1 if self.setting.more_is_better else -1
        points = [p for p in self.curve if math.isfinite(p.score)]
        if points and sign * points[0].score >= sign * target:
            return Reached(points[0].seconds, points[0].sent, bound=True)
        for a, b in pairwise(points):
            if sign * b.score >= sign * target:
                part = (target - a.score) / (b.score - a.score)
                sent = None if a.sent is None or b.sent is None else a.sent + part * (b.sent - a.sent)
                return Reached(a.seconds + part * (b.seconds - a.seconds), sent, bound=False)
        return None


@dataclass(frozen=True)
class Cell:
    """One step time in the map; ``ratio`` is to the baseline's time at that bandwidth, so less than 1 wins."""

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
    stubs: tuple[str, ...]  # files that were cut off before they said what they are
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
    """All runs of one spec in one setting."""

    name: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        """The finished runs."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def unfinished(self) -> tuple[Run, ...]:
        """The unfinished runs, which are shown but not counted."""
        return tuple(run for run in self.runs if not run.finished)

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """The spread of a value over the finished runs."""
        return Spread.of(value(run) for run in self.finished)

    @property
    def parts(self) -> dict[str, Spread]:
        """Seconds of a step by phase."""
        names = dict.fromkeys(part for run in self.finished for part in run.parts)
        spreads = {part: Spread.of(run.parts.get(part) for run in self.finished) for part in names}
        return {part: spread for part, spread in spreads.items() if spread is not None}


@dataclass(frozen=True)
class Comparison:
    """Specs beside each other in one setting, the baseline first and then in the order in which they were run."""

    setting: Setting
    groups: tuple[Group, ...]

    @property
    def baseline(self) -> Group | None:
        """What ratios refer to; None unless a run of it is finished."""
        return next((g for g in self.groups if g.finished and g.finished[0].spec == BASELINE), None)

    @property
    def setter(self) -> Run | None:
        """The finished run with the worst final score: what it reached, all reached."""
        ends = [run for g in self.groups for run in g.finished if run.end and math.isfinite(run.end.score)]
        worst = min if self.setting.more_is_better else max
        return worst(ends, key=lambda run: run.end.score if run.end else math.nan, default=None)

    @property
    def target(self) -> float | None:
        """The score for which times and bytes are compared."""
        return None if self.setter is None or self.setter.end is None else self.setter.end.score


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """One comparison per setting."""
    ordered = sorted(runs, key=lambda run: (run.time, run.file))
    settings: dict[Setting, dict[tuple[str, str], list[Run]]] = {}
    for run in ordered:
        settings.setdefault(run.setting, {}).setdefault((run.spec, run.expression), []).append(run)
    return [Comparison(setting, _groups(by_spec)) for setting, by_spec in settings.items()]


def _groups(by_spec: dict[tuple[str, str], list[Run]]) -> tuple[Group, ...]:
    specs = [spec for spec, _ in by_spec]
    groups = [  # by expression too: a preset may have changed between runs
        Group(spec if specs.count(spec) == 1 else f"{spec} = {expression}", tuple(runs))
        for (spec, expression), runs in by_spec.items()
    ]
    return tuple(sorted(groups, key=lambda group: group.runs[0].spec != BASELINE))


# ---- reading -------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Results:
    """Every run in a folder, and its map."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder. Name the one that `tersegrad train` wrote its results into.")
    paths = sorted(folder.glob("*.jsonl"))
    found = {path.name: read_run(path) for path in paths}
    runs = tuple(run for run in found.values() if run is not None)
    map_path = folder / MAP_FILE
    map_ = read_map(map_path) if map_path.exists() else None
    if not runs and map_ is None:
        why = f"its {len(paths)} .jsonl file(s) were cut off before the first line ended" if paths else "no .jsonl file"
        raise ValueError(f"{folder} has no runs to report: {why}. Make some with `tersegrad train --out {folder}`.")
    return Results(runs, tuple(name for name, run in found.items() if run is None), map_)


def read_run(path: Path) -> Run | None:
    """One file; None if it was cut off before its first line ended."""
    lines = list(_lines(path))
    if not lines:
        return None
    start, *rest = lines
    if start.event != "start":
        raise start.error(f"is {start.event!r}, but a run begins with 'start'. Is this another kind of file?")
    steps, evals, end = [], [], None
    for line in rest:
        if end is not None:
            raise line.error("comes after 'end'. One file is one run: write the next one elsewhere.")
        if line.event == "step":
            steps.append(_step(line))
        elif line.event == "eval":
            evals.append(_score(line))
        elif line.event == "end":
            end = _score(line)
        else:
            raise line.error(f"is {line.event!r}; known here are 'step', 'eval' and 'end'. Is it from a newer version?")
    return _run(path.name, start, tuple(steps), tuple(evals), end)


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
    """The cells of a map as ``map.json`` has them."""
    return tuple(_cell(_Line(f"{where}, cell {i},", r if isinstance(r, dict) else {})) for i, r in enumerate(rows, 1))


@dataclass(frozen=True)
class _Line:
    """Named values, and where they were read."""

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

    def choice(self, key: str, choices: Iterable[str]) -> str:
        value = self.text(key)
        if value not in choices:
            raise self.error(f"has {key} = {value!r}, which is unknown. It may be {', '.join(choices)}.")
        return value


def _lines(path: Path) -> Iterator[_Line]:
    """The lines of a file; what stands behind the last line break is left out if it is not whole."""
    whole, _, tail = path.read_bytes().rpartition(b"\n")
    for number, text in enumerate(whole.split(b"\n") if whole else [], 1):
        if text.strip():
            yield _line(f"{path}, line {number},", text)
    try:
        last = json.loads(tail)
    except ValueError:
        return  # the writer was cut off here
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


def _run(file: str, start: _Line, steps: tuple[Step, ...], evals: tuple[Score, ...], end: Score | None) -> Run:
    environment = start.fields.get("environment")
    if not isinstance(environment, dict):
        raise start.error("has no environment, a table of versions. Mend the line, or move the file away.")
    return Run(
        file=file,
        spec=start.text("spec"),
        expression=start.text("expression"),
        setting=_setting(start),
        seed=start.count("seed", least=0),
        parameters=start.count("parameters"),
        planned=start.count("steps"),
        compute=start.number("compute_ms") / 1000,
        command=start.text("command"),
        environment=tuple((str(key), _plain(value)) for key, value in environment.items()),
        time=start.text("time"),
        steps=steps,
        evals=evals,
        end=end,
    )


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _setting(start: _Line) -> Setting:
    return Setting(
        workload=start.text("workload"),
        metric=start.choice("metric", METRICS),
        workers=start.count("workers"),
        bandwidth=None if start.fields.get("bandwidth") is None else start.text("bandwidth"),
        latency=None if start.fields.get("latency") is None else start.text("latency"),
        network=start.choice("network", NETWORKS),
        batch=start.count("batch"),
        kernel_latency=start.fields.get("kernel_latency") is True,
        learning_rate=start.known("learning_rate"),
    )


def _step(line: _Line) -> Step:
    loss = line.known("loss")
    return Step(
        step=line.count("step"),
        seconds=line.number("seconds"),
        loss=math.nan if loss is None else loss,
        sent=line.known("sent"),
        encode=line.known("encode"),
        wait=line.known("wait"),
        decode=line.known("decode"),
        density=line.known("density"),
    )


def _score(line: _Line) -> Score:
    score = line.known("score")
    return Score(
        step=line.count("step", least=0 if line.event == "eval" else 1),
        seconds=line.number("seconds"),
        score=math.nan if score is None else score,
        sent=line.known("sent"),
    )


def _cell(line: _Line) -> Cell:
    ratio = line.number("ratio")
    if not (ratio > 0 and math.isfinite(ratio)):
        raise line.error(f"has ratio = {ratio:g}; times have a ratio above 0. Make the map again.")
    bandwidth = None if line.fields.get("bandwidth") is None else line.text("bandwidth")
    return Cell(line.text("spec"), bandwidth, line.number("ms"), ratio)
