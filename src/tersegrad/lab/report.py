"""The report: one HTML page about a folder of results, complete in itself, with its figures as PNG files beside it.

Every number in a table says what it is, in ``data-spec`` and ``data-key``, and its full value, in ``data-value``.
"""

import base64
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from tersegrad.lab import curves, plots
from tersegrad.lab.results import BASELINE, Comparison, Group, Map, Reached, Run, Setting, Spread, compare, read_folder

DASH = "&ndash;"
NETWORK_OPTIONS = "--bandwidth 100Mbit --latency 20ms --compute 250ms"
_TEXT = {"file": ' class="text"', "state": ' class="text"'}  # columns that are not numbers
_UNITS = {"seconds": "s", "minutes": "min", "hours": "h"}


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Writes ``report.html`` and its figures into ``out``: a folder, or the page's own name. Default: ``folder``."""
    results = read_folder(folder)
    where = folder if out is None else out
    page = where if where.suffix == ".html" else where / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    comparisons = compare(results.runs)
    titles = _titles([comparison.setting for comparison in comparisons])
    parts = []
    for number, (comparison, title) in enumerate(zip(comparisons, titles, strict=True), 1):
        prefix = f"{number}-" if len(comparisons) > 1 else ""
        parts.append(_comparison(comparison, title, _Album(page.parent, prefix)))
    if results.map is not None:
        parts.append(_map(results.map, _Album(page.parent, "")))
    if results.runs:
        parts += [_runs(comparisons, results.stubs), _commands(results.runs), _environment(results.runs)]
    several = f"{len(titles)} comparisons" if titles else "Where compression wins"
    page.write_text(_page(titles[0] if len(titles) == 1 else several, parts), encoding="utf-8")
    return page


# ---- one comparison ------------------------------------------------------------------------------


def _comparison(comparison: Comparison, title: str, album: "_Album") -> str:
    setting = comparison.setting
    return _join(
        f"<h1>{escape(title)}</h1>",
        _join(_does_it_hurt(comparison), _simulation(comparison)) if setting.simulated else "",
        "" if setting.simulated else _join(_link(setting), _first_at_target(comparison)),
        "<h2>Summary</h2>",
        _summary(comparison),
        _notes(comparison),
        "<h2>Curves</h2>",
        _curves(comparison, album),
        "" if setting.simulated else _step_time(comparison, album),
    )


def _titles(settings: Sequence[Setting]) -> list[str]:
    """One for each. Those that would be the same say in what else their runs differ."""
    titles = [_title(setting) for setting in settings]
    found = []
    for setting, title in zip(settings, titles, strict=True):
        same = [dict(other.identity) for other, its in zip(settings, titles, strict=True) if its == title]
        differs = [(key, value) for key, value in setting.identity if len({other.get(key) for other in same}) > 1]
        found.append(", ".join([title, *(f"{key} {plots.short(value, 24)}" for key, value in differs)]))
    return found


def _title(setting: Setting) -> str:
    kind = "simulated workers" if setting.simulated else "workers"
    steps = None if setting.steps is None else f"{setting.steps:,} steps"
    until = None if setting.until is None else f"until {setting.until}"
    rate = None if setting.learning_rate is None else f"learning rate {setting.learning_rate:g}"
    differs = [part for part in (steps, until, setting.bandwidth, setting.latency, rate) if part]
    return ", ".join([f"{setting.workload} on {setting.workers} {kind}", *differs])


def _link(setting: Setting) -> str:
    """What the network was, and which part of it was emulated."""
    rate = f"{setting.bandwidth} per worker" if setting.bandwidth else "unlimited bandwidth"
    delay = f", {setting.latency} one way" if setting.latency else ""
    if setting.network == "throttled":
        text = f"The network is <strong>EMULATED</strong> ({escape(rate + delay)}): every collective waits as long as "
        return f'<p class="warn">{text}it would take on that network. No packet crossed a slow network.</p>'
    if setting.network == "none":
        return "<p>Network: the machine's own loopback, at full speed.</p>"
    real = escape(rate + (delay if setting.kernel_latency else ""))
    text = f"Network: TCP between network namespaces of one machine, limited by the kernel to {real}."
    if not setting.latency or setting.kernel_latency:
        return f"<p>{text}</p>"
    emulated = f"The latency of {escape(setting.latency)} one way is <strong>EMULATED</strong>: every collective waits"
    return f'<p class="warn">{text} {emulated} as long as it would take.</p>'


def _simulation(comparison: Comparison) -> str:
    """What was simulated, and where the times come from."""
    setting = comparison.setting
    text = (
        f"<strong>SIMULATED</strong>: {setting.workers} virtual workers in one process. Scores and bytes are real: the "
        "gradients of all workers were compressed, counted and averaged as in distributed training."
    )
    if comparison.timed:
        network = [setting.bandwidth] if setting.bandwidth else []
        network += [f"{setting.latency} one way"] if setting.latency else []
        compute = Spread.of(run.compute for run in comparison.runs)
        network += [f"{_range_of(compute, 1e3)} ms of computation per step"] if compute else []
        given = f" for {escape(', '.join(network))}" if network else ""
        times = f"Times are <strong>PREDICTED</strong> by the planner's model{given}."
    else:
        times = f"No network was given, so there are no times. To predict them, add <code>{NETWORK_OPTIONS}</code>."
    return f'<p class="warn">{text} {times}</p>'


def _range_of(spread: Spread, factor: float) -> str:
    low, high = _digits(factor * spread.low), _digits(factor * spread.high)
    return low if low == high else f"{low} to {high}"


def _first_at_target(comparison: Comparison) -> str:
    """The first sentence about measured runs: which spec was the first at the target, and when."""
    rows = [(time, group) for group in comparison.groups if (time := _time_to_target(comparison, group)) is not None]
    if len(rows) < 2 or comparison.target is None:
        return ""
    time, best = min(rows, key=lambda row: row[0].median)
    goal = _marked("lead_target", comparison.target, _score(comparison, comparison.target))
    took = _marked("lead_seconds", time.median, f"{_bound(comparison, best)}{_digits(time.median)} s", best.name)
    text = f"First at {goal}: <b>{_name(best.name)}</b>, after {took} of training"
    base = comparison.baseline
    plain = None if base is None else _time_to_target(comparison, base)
    if base is not None and plain is not None and best is not base:
        needed = _marked(
            "seconds_to_target", plain.median, f"{_bound(comparison, base)}{_digits(plain.median)} s", BASELINE
        )
        text += f"; <code>{BASELINE}</code> needed {needed}"
    return f'<p class="lead">{text}.</p>'


# ---- does it hurt? -------------------------------------------------------------------------------


def _does_it_hurt(comparison: Comparison) -> str:
    """The first sentence about simulated runs, one for each spec: how its scores compare with the baseline's."""
    base = comparison.baseline
    others = [group for group in comparison.groups if group.finished and group is not base]
    if base is None:
        text = f"Whether compression hurts cannot be said yet: there is no finished run of <code>{BASELINE}</code>."
        return f'<p class="lead">{text}</p>'
    if not base.sound:
        return f'<p class="lead"><code>{BASELINE}</code> itself <b>diverged</b>: mend the training first.</p>'
    compared = [_against(comparison, base, group) for group in others]
    if base.diverged:
        lost = f"{len(base.diverged)} of {len(base.finished)} runs"
        compared.insert(0, f"<code>{BASELINE}</code> itself <b>diverged</b> in {lost}, which are not counted")
    if len(compared) == 1:
        return f'<p class="lead">{compared[0]}.</p>'
    return '<ul class="lead">' + "".join(f"<li>{text}.</li>" for text in compared) + "</ul>" if compared else ""


def _against(comparison: Comparison, base: Group, group: Group) -> str:
    said = f"<b>{_name(group.name)}</b> "
    if group.diverged:
        lost, count = len(group.diverged), len(group.finished)
        runs = {1: "", 2: " in both runs"}.get(count, f" in all {count} runs")
        said += f"<b>diverged</b>{f' in {lost} of {count} runs' if group.sound else runs}"
        if not group.sound:
            return said
        said += "; otherwise it "
    against = _steps_against if comparison.setting.until else _score_against
    return said + against(comparison, base, group) + _bytes_against(comparison, group)


def _score_against(comparison: Comparison, base: Group, group: Group) -> str:
    own, plain = _final(comparison, group), _final(comparison, base)
    if own is None or plain is None:
        return "has no score to compare"
    gap = own.median - plain.median
    shown = _difference(comparison, abs(gap))
    metric = escape(comparison.setting.metric)
    if shown == _difference(comparison, 0):
        where = f"{_marked('lead_gap', gap, 'level', group.name)} with <code>{BASELINE}</code>"
    else:
        side = "above" if gap > 0 else "below"
        where = f"{_marked('lead_gap', gap, shown, group.name)} {side} <code>{BASELINE}</code>"
    if not comparison.setting.higher_is_better:
        where += f" in {metric}, where lower is better"
    elif not comparison.percent:
        where += f" in {metric}"
    return f"ends {where} ({_chance(own, plain, lambda v: _difference(comparison, v), group)})"


def _steps_against(comparison: Comparison, base: Group, group: Group) -> str:
    """For runs that ended as soon as they were good enough."""
    goal = escape(str(comparison.setting.until))
    own, plain = _steps_run(comparison, group), _steps_run(comparison, base)
    there = [run for run in group.sound if run.because == "until"]
    if not there or own is None:
        return f"does not reach {goal} in {comparison.setting.steps:,} steps"
    needed = _marked("lead_steps", own.median, f"{own.median:,.0f} steps", group.name)
    some = "" if len(there) == len(group.sound) else f", in {len(there)} of {len(group.sound)} runs"
    if plain is None:
        return f"reaches {goal} after {needed}{some}, <code>{BASELINE}</code> does not reach it"
    chance = _chance(own, plain, lambda v: f"{v:,.0f} steps", group)
    return f"reaches {goal} after {needed}{some}, <code>{BASELINE}</code> after {plain.median:,.0f} ({chance})"


def _chance(own: Spread, plain: Spread, show: Callable[[float], str], group: Group) -> str:
    if max(own.count, plain.count) < 2:
        return "one seed each"
    spread = max(own.high - own.low, plain.high - plain.low)
    return f"spread over seeds {_marked('lead_spread', spread, show(spread), group.name)}"


def _bytes_against(comparison: Comparison, group: Group) -> str:
    ratio = _over(_step_mb)(comparison, group)
    if ratio is None:
        return ""
    fewer = ratio.median >= 1
    shown = f"{_digits(ratio.median if fewer else 1 / ratio.median)}&times; {'fewer' if fewer else 'more'} bytes"
    return f" with {_marked('lead_fewer_bytes', ratio.median, shown, group.name)}"


# ---- the summary table ---------------------------------------------------------------------------

_Value = Callable[[Comparison, Group], Spread | None]


@dataclass(frozen=True)
class _Column:
    """One number of a spec: its name, how it is computed, and in which form it is shown."""

    key: str
    head: str
    value: _Value
    form: str = "number"  # or score, drop, ratio, share, count, time


def _over(value: _Value) -> _Value:
    """The baseline's median divided by the spec's."""

    def ratio(comparison: Comparison, group: Group) -> Spread | None:
        plain = None if comparison.baseline is None else value(comparison, comparison.baseline)
        own = value(comparison, group)
        if plain is None or own is None or own.median == 0:
            return None
        return Spread.of([plain.median / own.median])

    return ratio


def _final(comparison: Comparison, group: Group) -> Spread | None:
    return group.sound_spread(lambda run: None if run.end is None else run.end.score)


def _step_ms(comparison: Comparison, group: Group) -> Spread | None:
    spread = group.spread(lambda run: run.step_seconds)
    return None if spread is None else spread.scaled(1e3)


def _step_mb(comparison: Comparison, group: Group) -> Spread | None:
    spread = group.spread(lambda run: run.step_sent)
    return None if spread is None else spread.scaled(1e-6)


def _steps_run(comparison: Comparison, group: Group) -> Spread | None:
    return group.sound_spread(lambda run: None if run.end is None or run.because != "until" else run.end.step)


def _worst_drop(comparison: Comparison, group: Group) -> Spread | None:
    return group.sound_spread(lambda run: run.worst_drop)


def _waiting(comparison: Comparison, group: Group) -> Spread | None:
    return group.sound_spread(lambda run: run.waiting)


def _reached(comparison: Comparison, group: Group) -> list[Reached]:
    if comparison.target is None:
        return []
    return [found for run in group.sound if (found := run.reach(comparison.target)) is not None]


def _bound(comparison: Comparison, group: Group) -> str:
    return "≤ " if any(found.bound for found in _reached(comparison, group)) else ""


def _time_to_target(comparison: Comparison, group: Group) -> Spread | None:
    return Spread.of(found.seconds for found in _reached(comparison, group))


def _mb_to_target(comparison: Comparison, group: Group) -> Spread | None:
    spread = Spread.of(found.sent for found in _reached(comparison, group))
    return None if spread is None else spread.scaled(1e-6)


_MEASURED = (
    _Column("score", "final {metric}", _final, "score"),
    _Column("ms_per_step", "ms / step", _step_ms),
    _Column("speedup", "speed-up", _over(_step_ms), "ratio"),
    _Column("mb_per_step", "MB / step", _step_mb),
    _Column("fewer_bytes", "fewer bytes", _over(_step_mb), "ratio"),
    _Column("seconds_to_target", "{unit} to {target}", _time_to_target, "time"),
    _Column("target_speedup", "sooner", _over(_time_to_target), "ratio"),
    _Column("mb_to_target", "MB to {target}", _mb_to_target),
)
_SIMULATED = (
    _Column("score", "final {metric}", _final, "score"),
    _Column("steps_run", "steps", _steps_run, "count"),
    _Column("mb_per_step", "MB / step", _step_mb),
    _Column("fewer_bytes", "fewer bytes", _over(_step_mb), "ratio"),
    _Column("predicted_ms_per_step", "predicted ms / step", _step_ms),
    _Column("predicted_seconds_to_target", "predicted {unit} to {target}", _time_to_target, "time"),
    _Column("worst_drop", "worst moment{points}", _worst_drop, "drop"),
    _Column("waiting", "waiting", _waiting, "share"),
)


def _columns(comparison: Comparison) -> list[_Column]:
    if not comparison.setting.simulated:
        return list(_MEASURED)
    left_out = set() if comparison.timed else {"predicted_ms_per_step", "predicted_seconds_to_target"}
    left_out |= set() if comparison.setting.until else {"steps_run"}
    return [column for column in _SIMULATED if column.key not in left_out]


def _summary(comparison: Comparison) -> str:
    target = "target" if comparison.target is None else _score(comparison, comparison.target)
    names = {"metric": comparison.setting.metric, "target": target, "unit": _UNITS[_time_unit(comparison)[0]]}
    names["points"] = ", points" if comparison.percent else ""
    columns = _columns(comparison)
    rows = []
    for group, (colour, _) in zip(comparison.groups, plots.looks(comparison.groups), strict=True):
        cells = [_summary_cell(comparison, group, column) for column in columns]
        rows.append(_join(_spec_cell(group, colour), *cells))
    return _table("Summary", ["spec", *(column.head.format(**names) for column in columns)], rows)


def _time_unit(comparison: Comparison) -> tuple[str, float]:
    spreads = [_time_to_target(comparison, group) for group in comparison.groups]
    return curves.time_unit(max((spread.high for spread in spreads if spread is not None), default=0))


def _summary_cell(comparison: Comparison, group: Group, column: _Column) -> str:
    shows: dict[str, Callable[[float], str]] = {
        "number": _digits,
        "score": lambda v: _score(comparison, v),
        "drop": lambda v: _difference(comparison, v).removesuffix(" points"),
        "ratio": lambda v: f"{_digits(v)}&times;",
        "share": lambda v: f"{100 * v:.0f} %",
        "count": lambda v: f"{v:,.0f}",
        "time": lambda v: _digits(v / _time_unit(comparison)[1]),
    }
    spread = column.value(comparison, group)
    before = after = ""
    missing = DASH
    if column.key.endswith("_to_target"):
        before = _bound(comparison, group)
        reached = len(_reached(comparison, group))
        if reached < len(group.sound) and comparison.target is not None:
            after = f"<small>reached by {reached} of {len(group.sound)}</small>"
    elif column.form == "score" and group.diverged and not group.sound:
        missing = "diverged"
    return _number(group.name, column.key, spread, shows[column.form], before=before, after=after, missing=missing)


def _spec_cell(group: Group, colour: str) -> str:
    dot = f'<i class="dot" style="--light:{colour};--dark:{plots.THEME[colour]}"></i>'
    notes = [f"{len(group.finished)} seeds"] if len(group.finished) > 1 else []
    notes += [f"seed {run.seed} diverged at step {run.diverged:,}" for run in group.diverged]
    notes += [f"seed {run.seed} unfinished: step {run.last_step} of {run.planned}" for run in group.unfinished]
    small = "".join(f"<small>{escape(note)}</small>" for note in notes)
    return f'<th scope="row" class="dotted">{dot}{_name(group.name)}{small}</th>'


# ---- notes below the table -----------------------------------------------------------------------


def _notes(comparison: Comparison) -> str:
    """What the numbers in the table mean."""
    several = "Several seeds: the median, and below it [least, most]."
    lines = _notes_on_simulated(comparison) if comparison.setting.simulated else _notes_on_measured(comparison)
    lines = [several, *lines, _target_note(comparison), _diverged_note(comparison), _baseline_note(comparison)]
    lines += [_unfinished_note(comparison), _replaced_note(comparison)]
    return '<ul class="notes">' + "".join(f"<li>{line}</li>" for line in lines if line) + "</ul>"


def _notes_on_measured(comparison: Comparison) -> list[str]:
    counted = "as the kernel counts them, with packet headers and acknowledgements"
    if comparison.setting.network != "netns":
        counted = "with headers, indices and padding"
    lines = [
        "<b>ms / step</b>: training time without evaluations, divided by the number of steps.",
        f"<b>MB</b>: million bytes that one worker sent, {counted}.",
        "<b>Speed-up</b>, <b>fewer bytes</b>, <b>sooner</b>: the median of "
        f"<code>{BASELINE}</code> divided by that of the spec.",
    ]
    lengths = sorted({run.end.step for group in comparison.groups for run in group.finished if run.end})
    if len(lengths) > 1:
        lines.append(f"The runs differ in length, from {lengths[0]} to {lengths[-1]} steps.")
    return lines


def _notes_on_simulated(comparison: Comparison) -> list[str]:
    setting = comparison.setting
    unit = "in percentage points" if comparison.percent else f"in the unit of {escape(setting.metric)}"
    moved = "fell below" if setting.higher_is_better else "rose above"
    lines = [
        "<b>Spread over seeds</b>: most minus least, of the spec or of "
        f"<code>{BASELINE}</code>, whichever is larger. A difference smaller than that may be chance.",
        "<b>MB</b>: million bytes that one worker sent, mean over the workers, with headers, indices and padding.",
        f"<b>Fewer bytes</b>: bytes per step, the median of <code>{BASELINE}</code> divided by that of the spec.",
        f"<b>Worst moment</b>: the farthest that the score {moved} the best score before it in the same run, {unit}. "
        "0: no evaluation was worse than an earlier one.",
        "<b>Waiting</b>: share of the gradient's energy (sum of squares) that is kept in residuals for later steps, "
        "mean over the last half of the run.",
    ]
    if comparison.timed:
        lines.append("<b>Predicted</b>: computed by the planner's model, not measured.")
    if setting.until:
        lines.append(f"<b>Steps</b>: after how many steps the run ended because {escape(setting.until)}.")
    lines.append(
        f"Only runs planned for {setting.steps:,} steps are compared here. A learning-rate schedule stretches with the "
        "planned steps, so runs of another length are another training."
    )
    for key, values in comparison.differences.items():
        shown = ", ".join(plots.short(value, 40) for value in values[:4]) + (", …" if len(values) > 4 else "")
        lines.append(f"<b>These runs differ</b> in {escape(key)} too: {escape(shown)}.")
    return lines


def _target_note(comparison: Comparison) -> str:
    setter, target = comparison.setter, comparison.target
    if target is None:
        return "No finished run has a score, so there is no target at which times and bytes could be compared."
    if not comparison.shows_target:
        return ""
    shown = _marked("target", target, _score(comparison, target))
    whose = f"The target is {shown}, the score in <code>{escape(str(comparison.setting.until))}</code>."
    if setter is not None:
        worst = "lowest" if comparison.setting.higher_is_better else "highest"
        whose = (
            f"The target is {shown}, the {worst} final score of all runs that are finished and did not diverge "
            f"({_name(setter.spec)}, seed {setter.seed}), so all of these reached it."
        )
        if comparison.floor is not None and any(not _reached(comparison, g) for g in comparison.groups if g.sound):
            whose += (
                f" Not counted are runs that ended worse than {_score(comparison, comparison.floor)}, halfway between "
                f"the first and the last score of <code>{BASELINE}</code>."
            )
    return (
        f"<b>Equal {escape(comparison.setting.metric)}</b>: {whose} Times and bytes are those at which a run first "
        "reached the target, interpolated between evaluations; ≤: at its first evaluation, or before."
    )


def _diverged_note(comparison: Comparison) -> str:
    if not any(group.diverged for group in comparison.groups):
        return ""
    return (
        "<b>Diverged</b>: from that step on, loss or score was not a finite number. Such a run ends in a cross in the "
        "figures, and its scores are not counted."
    )


def _baseline_note(comparison: Comparison) -> str:
    if comparison.baseline is not None:
        return ""
    tried = any(group.runs[0].spec == BASELINE for group in comparison.groups)
    why = (
        f"the run of <code>{BASELINE}</code> is not finished"
        if tried
        else f"there is no run of <code>{BASELINE}</code>"
    )
    return f"Ratios are left out ({DASH}): {why}."


def _unfinished_note(comparison: Comparison) -> str:
    runs = [run for group in comparison.groups for run in group.unfinished]
    if not runs:
        return ""
    names = ", ".join(f"{_name(run.spec)} (seed {run.seed})" for run in runs)
    return f"<b>Unfinished</b>, dotted in the figures and not counted: {names}."


def _replaced_note(comparison: Comparison) -> str:
    if not comparison.replaced:
        return ""
    files = ", ".join(f"<code>{escape(run.file)}</code>" for run in comparison.replaced)
    return f"<b>Left out</b>, because there is a later run of the same spec and seed: {files}."


# ---- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Album:
    """The folder that figures are saved in, and what their names begin with."""

    folder: Path
    prefix: str

    def show(self, figure: Figure | None, name: str, alt: str, caption: str) -> str:
        """Save a figure as PNG, and return HTML that contains it as SVG; nothing if there is no figure."""
        if figure is None:
            return ""
        plots.save(figure, self.folder / f"{self.prefix}{name}.png")
        data = base64.b64encode(plots.svg(figure).encode()).decode()
        width, height = (round(72 * inches) for inches in figure.get_size_inches())
        source = f'src="data:image/svg+xml;base64,{data}" width="{width}" height="{height}"'
        return f'<figure><img {source} alt="{escape(alt)}"><figcaption>{escape(caption)}</figcaption></figure>'


def _curves(comparison: Comparison, album: _Album) -> str:
    setting = comparison.setting
    metric = setting.metric if setting.simulated else f"test {setting.metric}"
    title = metric[:1].upper() + metric[1:]
    names = ", ".join(group.name for group in comparison.groups)
    dotted = " Dotted line: the target." if comparison.shows_target else ""
    shown: list[str] = []

    def add(figure: Figure | None, name: str, alt: str, caption: str) -> None:
        ends = _ends(comparison) if name.startswith("score") else ""
        shown.append(album.show(figure, name, f"{alt}, for {names}.{ends}", caption))

    if any(math.isfinite(p.score) for run in comparison.runs for p in run.curve):
        by_step, by_bytes = f"{title} against steps", f"{title} against bytes sent by one worker"
        by_time = f"{title} against {'predicted ' if setting.simulated else ''}training time"
        if setting.simulated:
            add(curves.score_by_step(comparison), "score-steps", by_step, f"{by_step}.{dotted}")
        else:
            add(curves.score_by_time(comparison), "score-time", by_time, f"{by_time}.{dotted}")
        add(curves.score_by_bytes(comparison), "score-bytes", by_bytes, f"{by_bytes}.{dotted}")
        if setting.simulated:
            network = ", ".join(part for part in (setting.bandwidth, setting.latency) if part)
            caption = f"{by_time}{f' ({network})' if network else ''}, not measured.{dotted}"
            add(curves.score_by_time(comparison), "score-time", by_time, caption)
    whose = "" if setting.simulated else ", of one worker's batches"
    caption = f"Training loss against steps{whose}. With many steps, each point is the mean of several."
    add(curves.loss_by_step(comparison), "loss", "Training loss against steps", caption)
    caption = "Density: the share of the elements that a sparse method sent."
    add(curves.density_by_step(comparison), "density", "Density of sparse methods against steps", caption)
    return f'<div class="figures">{_join(*shown)}</div>'


def _ends(comparison: Comparison) -> str:
    """Where the curves end, in words."""
    said = []
    predicted = "predicted " if comparison.setting.simulated else ""
    for group in comparison.groups:
        score = _final(comparison, group)
        time = group.sound_spread(lambda run: run.end.seconds if run.end else None)
        if score is not None:
            after = "" if time is None else f" after {predicted}{_digits(time.median)} seconds"
            said.append(f"{group.name} ends at {_score(comparison, score.median)}{after}")
        elif group.diverged:
            said.append(f"{group.name} diverged")
    return f" {'; '.join(said)}." if said else ""


def _step_time(comparison: Comparison, album: _Album) -> str:
    groups = [group for group in comparison.groups if group.finished]
    title = "<h2>Where a step's time goes</h2>"
    if not groups:
        return f"{title}<p>No run is finished.</p>"
    parts = [part for part in plots.PARTS if any(part in group.parts for group in groups)]
    alt = f"Stacked bars of the milliseconds of one step, split into {', '.join(parts)}, for "
    alt += ", ".join(group.name for group in groups) + ". The table holds the same numbers."
    caption = (
        "Compute: a step without communication. Encode, wait and decode overlap with it, because gradients are sent "
        "while others are still being computed. So a bar can be longer than the measured step (the upright mark)."
    )
    if "not split" in parts:
        caption += " Not split: the rest of a step whose phases were not measured, because it ran without our hook."
    figure = album.show(plots.step_time(comparison), "step-time", alt, caption)
    return f'{title}<div class="figures">{figure}{_step_table(comparison, groups, parts)}</div>'


def _step_table(comparison: Comparison, groups: Sequence[Group], parts: Sequence[str]) -> str:
    shown = ["measured", *(part for part in parts if part != "not split")]
    rows = []
    for group in groups:
        cells = [f'<th scope="row">{_name(group.name)}</th>']
        spreads = {"measured": _step_ms(comparison, group)}
        spreads |= {part: seconds.scaled(1e3) for part, seconds in group.parts.items()}
        cells += [_number(group.name, f"{part}_ms", spreads.get(part), _digits, ranged=False) for part in shown]
        rows.append(_join(*cells))
    return _table("Milliseconds of one step", ["ms / step", *shown], rows)


# ---- the map -------------------------------------------------------------------------------------


def _map(chart: Map, album: _Album) -> str:
    specs, bandwidths = plots.map_axes(chart.cells)
    by_place = {(cell.spec, cell.bandwidth): cell for cell in chart.cells}
    wins = sum(cell.ratio < 1 for cell in chart.cells)
    alt = (
        f"Map of step times by spec and bandwidth: faster than {chart.baseline} in {wins} of {len(chart.cells)} cells."
    )
    caption = (
        f"Step time of each spec divided by that of {chart.baseline} at the same bandwidth, "
        f"{chart.workload} on {chart.workers} workers. Blue, below 1: faster. Red, above 1: slower."
    )
    rows = []
    for spec in specs:
        cells = [f'<th scope="row">{_name(spec)}</th>']
        for bandwidth in bandwidths:
            cell = by_place.get((spec, bandwidth))
            more = {"data-bandwidth": bandwidth or "", "data-ms": "" if cell is None else repr(cell.ms)}
            ratio = None if cell is None else Spread.of([cell.ratio])
            below = "" if cell is None else f"<small>{_digits(cell.ms)} ms</small>"
            cells.append(_number(spec, "map_ratio", ratio, plots.show_ratio, more=more, after=below))
        rows.append(_join(*cells))
    figure = album.show(plots.map_figure(chart.cells, chart.baseline), "map", alt, caption)
    table = _table("Step time ratios", ["spec", *(b or "no limit" for b in bandwidths)], rows)
    command = f"<pre><code>{escape(chart.command)}</code></pre>" if chart.command else ""
    return f'<h2>Where compression wins, and where it loses</h2><div class="figures">{figure}{table}</div>{command}'


# ---- what was run --------------------------------------------------------------------------------


def _runs(comparisons: Sequence[Comparison], stubs: Sequence[str]) -> str:
    measured = [c for c in comparisons if not c.setting.simulated]
    simulated = [c for c in comparisons if c.setting.simulated]
    cut = ", ".join(f"<code>{escape(name)}</code>" for name in stubs)
    note = f"<p>Without a complete first line, so not shown: {cut}.</p>" if cut else ""
    expressions = dict.fromkeys((run.spec, run.expression) for c in comparisons for run in c.runs)
    meanings = _join(*(f"<dt>{escape(s)}</dt><dd><code>{escape(e)}</code></dd>" for s, e in expressions if s != e))
    return _join(
        "<h2>Runs</h2>" + _run_table("Runs", measured) if measured else "",
        "<h2>Simulated runs</h2>" + _run_table("Simulated runs", simulated) if simulated else "",
        note,
        f"<dl>{meanings}</dl>" if meanings else "",
    )


def _run_table(label: str, comparisons: Sequence[Comparison]) -> str:
    """Runs of one kind: measured or simulated."""
    timed = any(comparison.timed for comparison in comparisons)
    time = {"seconds": "run_seconds"}
    if comparisons[0].setting.simulated:
        time = ({"predicted s": "run_predicted_seconds"} if timed else {}) | {"s to simulate": "run_wall"}
    rows = [_run_row(comparison, run, list(time.values())) for comparison in comparisons for run in comparison.runs]
    return _table(label, ["spec", "seed", "state", "steps", *time, "MB sent", "score", "file"], rows)


def _run_row(comparison: Comparison, run: Run, times: Sequence[str]) -> str:
    score = run.curve[-1].score if run.curve else None
    state = "unfinished" if not run.finished else "finished" if run.diverged is None else "diverged"

    def cell(key: str, value: float | None, show: Callable[[float], str]) -> str:
        return _number(run.spec, key, Spread.of([value]), show, more={"data-file": run.file})

    return _join(
        f'<th scope="row">{_name(run.spec)}</th>',
        cell("run_seed", run.seed, lambda v: f"{v:.0f}"),
        f'<td class="text {state}" data-spec="{escape(run.spec)}" data-file="{escape(run.file)}">{state}</td>',
        cell("run_steps", run.last_step, lambda v: f"{v:.0f} of {run.planned}"),
        *(cell(key, run.wall if key == "run_wall" else run.seconds, _digits) for key in times),
        cell("run_mb", None if run.sent is None else run.sent / 1e6, _digits),
        cell("run_score", score, lambda v: _score(comparison, v)),
        f'<td class="text">{escape(run.file)}</td>',
    )


def _commands(runs: Sequence[Run]) -> str:
    commands = dict.fromkeys(run.command for run in runs)
    return "<h2>Commands</h2>" + "".join(f"<pre><code>{escape(command)}</code></pre>" for command in commands)


def _environment(runs: Sequence[Run]) -> str:
    """Versions and machine; where runs differ, all values."""
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        about = [*run.environment, ("parameters of the model", f"{run.parameters:,}")]
        about += [] if run.setting.batch is None else [("batch", str(run.setting.batch))]
        for key, value in (*about, ("day", run.time.partition("T")[0])):
            values.setdefault(key, {})[value] = None
    rows = [
        f'<th scope="row">{escape(key)}</th><td class="text" data-key="{escape(key)}">{escape("; ".join(several))}</td>'
        for key, several in values.items()
    ]
    return "<h2>Environment</h2>" + _table("Environment", [], rows)


# ---- parts of a page -----------------------------------------------------------------------------


def _number(
    spec: str,
    key: str,
    spread: Spread | None,
    show: Callable[[float], str],
    before: str = "",
    after: str = "",
    ranged: bool = True,
    more: dict[str, str] | None = None,
    missing: str = DASH,
) -> str:
    """A table cell: the median, and the range over seeds if it shows."""
    names = {"data-spec": spec, "data-key": key, **(more or {})}
    if spread is None:
        return f"<td{_attributes(names)}>{missing}{after}</td>"
    names["data-value"] = repr(spread.median)
    if spread.count > 1:
        names |= {"data-min": repr(spread.low), "data-max": repr(spread.high)}
    if ranged and show(spread.low) != show(spread.high):
        after = f"<small>[{show(spread.low)}, {show(spread.high)}]</small>{after}"
    return f"<td{_attributes(names)}>{before}{show(spread.median)}{after}</td>"


def _marked(key: str, value: float, shown: str, spec: str | None = None) -> str:
    """A number in a sentence."""
    names = {} if spec is None else {"data-spec": spec}
    return f"<b{_attributes(names | {'data-key': key, 'data-value': repr(value)})}>{shown}</b>"


def _name(spec: str) -> str:
    """A spec that may be broken into lines after each opening bracket."""
    return re.sub(r"\((?!\))", "(<wbr>", escape(spec))


def _unbroken(head: str) -> str:
    """A column's head that is not broken within "ms / step", "MB to", "s to" or "90.00 %"."""
    return re.sub(r" (?=[/%]|s$)|(?<=/) |(?<=\bMB) |(?<=\bto) |(?<=^s) ", "&nbsp;", escape(head))


def _attributes(names: dict[str, str]) -> str:
    return "".join(f' {name}="{escape(value)}"' for name, value in names.items())


def _table(label: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col"{_TEXT.get(name, "")}>{_unbroken(name)}</th>' for name in heads)
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if heads else ""
    region = f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">'
    return f"{region}<table>{top}<tbody>\n{body}</tbody></table></div>"


def _digits(value: float) -> str:
    """A number with three significant digits.

    >>> _digits(1234.5), _digits(12.345), _digits(0.012345), _digits(0)
    ('1,234', '12.3', '0.0123', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".") if value else "0"


def _score(comparison: Comparison, value: float) -> str:
    return f"{100 * value:.2f} %" if comparison.percent else f"{value:,.{_decimals(comparison)}f}"


def _difference(comparison: Comparison, value: float) -> str:
    """A difference of two scores."""
    return f"{100 * value:.2f} points" if comparison.percent else f"{value:,.{_decimals(comparison)}f}"


def _decimals(comparison: Comparison) -> int:
    """As many as give the smallest final score four significant digits, but two at least and six at most."""
    finals = [abs(s.median) for group in comparison.groups if (s := _final(comparison, group)) is not None and s.median]
    return min(6, max(2, 3 - math.floor(math.log10(min(finals))))) if finals else 2


def _join(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _page(title: str, parts: Sequence[str]) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · tersegrad</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<p class="brand">tersegrad report</p>
{_join(*parts)}
</main>
</body>
</html>
"""


_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1e2329; --muted: #59626d; --line: #dde1e6; --soft: #f5f6f8;
  --warn: #fdf3df; --edge: #b87414; --shade: #d5dae0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16191d; --ink: #e8eaed; --muted: #a3abb5; --line: #363c44; --soft: #1f2329;
    --warn: #33291a; --edge: #d99a35; --shade: #3a414a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%;
}
main { max-width: 70rem; margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 4rem; }
h1 { font-size: clamp(1.5rem, 1.1rem + 2vw, 2.2rem); line-height: 1.2; margin: .2rem 0 .8rem; font-weight: 650; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .8rem; font-weight: 650; }
h1, h2, p, th, dt, dd, li { overflow-wrap: break-word; }
p, ul, dl { max-width: 46rem; }
figure + h1, div + h1 { margin-top: 4rem; }
.brand { margin: 0; color: var(--muted); font-size: .875rem; }
.lead { font-size: 1.15rem; line-height: 1.45; }
.lead b { font-weight: 650; }
.lead b[data-key="lead_spread"], .lead b[data-key="lead_fewer_bytes"] { font-weight: inherit; }
ul.lead { font-size: 1.0625rem; padding-left: 1.2rem; max-width: 62rem; }
ul.lead li { margin: .3rem 0; }
.warn { background: var(--warn); border-left: 3px solid var(--edge); padding: .6rem .9rem; border-radius: 0 4px 4px 0; }
.notes { color: var(--muted); font-size: .875rem; padding-left: 1.1rem; margin: .9rem 0 0; }
.notes b { color: var(--ink); font-weight: 600; }
.notes li { margin: .2rem 0; }
.scroll {
  overflow-x: auto; -webkit-overflow-scrolling: touch;  /* a shade on the right as long as there is more to the right */
  background: linear-gradient(to left, var(--paper) 40%, transparent) right / 2.5rem 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / 1.1rem 100% no-repeat scroll;
}
.scroll:focus-visible { outline: 2px solid var(--edge); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; }
table { font-size: .9375rem; font-variant-numeric: tabular-nums lining-nums; }
th, td { padding: .5rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; text-align: right; }
td { white-space: nowrap; }
thead th { color: var(--muted); font-weight: 500; font-size: .8125rem; vertical-align: bottom; }
th:first-child {
  position: sticky; left: 0; background: var(--paper); text-align: left; font-weight: 600; padding-left: 0;
  max-width: 16rem; min-width: 5rem;
}
tbody th { overflow-wrap: break-word; line-height: 1.35; }
tr .text { text-align: left; }
.dotted { padding-left: 1.2rem !important; }
@media (max-width: 40rem) {
  th:first-child { max-width: 9rem; }
  th.dotted:first-child { max-width: 10rem; }
  tbody th { font-size: .8125rem; }
}
small { display: block; color: var(--muted); font-size: .75rem; font-weight: 400; }
.unfinished, .diverged { color: var(--edge); }
.dot { position: absolute; left: 0; top: .85rem; width: .65rem; height: .65rem; border-radius: 50%; }
.dot { background: var(--light); }
@media (prefers-color-scheme: dark) { .dot { background: var(--dark); } }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.6rem 2.4rem; }
.figures > * { min-width: 0; }
figure { margin: 0; }
img { display: block; width: 100%; height: auto; }
figcaption { color: var(--muted); font-size: .875rem; margin-top: .4rem; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .875rem; }
pre { background: var(--soft); padding: .7rem .9rem; border-radius: 4px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
dl { font-size: .9375rem; } dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; overflow-wrap: anywhere; }
@media print { .scroll { overflow: visible; } main { max-width: none; } }
"""
