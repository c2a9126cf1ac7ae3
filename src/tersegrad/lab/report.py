"""The report: one page that needs nothing else, made of a folder of results, with its pictures as PNG beside it.

Every number in a table carries what it is and its full value, as ``data-spec``, ``data-key`` and ``data-value``.
"""

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from tersegrad.lab import plots
from tersegrad.lab.results import BASELINE, Comparison, Group, Map, Reached, Run, Setting, Spread, compare, read_folder

DASH = "&ndash;"
_TEXT = {"file": ' class="text"'}  # columns that are not numbers


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Writes ``report.html`` and its pictures into ``out``: a folder, or the page's own name. Default: ``folder``."""
    results = read_folder(folder)
    where = folder if out is None else out
    page = where if where.suffix == ".html" else where / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    comparisons = compare(results.runs)
    parts = []
    for number, comparison in enumerate(comparisons, 1):
        prefix = f"{number}-" if len(comparisons) > 1 else ""
        parts.append(_comparison(comparison, _Album(page.parent, prefix)))
    if results.map is not None:
        parts.append(_map(results.map, _Album(page.parent, "")))
    if results.runs:
        parts += [_runs(comparisons, results.stubs), _commands(results.runs), _environment(results.runs)]
    titles = [_title(c.setting) for c in comparisons] or ["Where compression wins"]
    page.write_text(_page(titles[0] if len(titles) == 1 else f"{len(titles)} comparisons", parts), encoding="utf-8")
    return page


# ---- one comparison ------------------------------------------------------------------------------


def _comparison(comparison: Comparison, album: "_Album") -> str:
    setting = comparison.setting
    return _join(
        f"<h1>{escape(_title(setting))}</h1>",
        _link(setting),
        _lead(comparison),
        "<h2>Summary</h2>",
        _summary(comparison),
        _notes(comparison),
        f"<h2>{setting.metric.capitalize()} and loss</h2>",
        _curves(comparison, album),
        "<h2>Where a step's time goes</h2>",
        _step_time(comparison, album),
    )


def _title(setting: Setting) -> str:
    rate = None if setting.learning_rate is None else f"learning rate {setting.learning_rate:g}"
    differs = [part for part in (setting.bandwidth, setting.latency, rate) if part]
    return ", ".join([f"{setting.workload} on {setting.workers} workers", *differs])


def _link(setting: Setting) -> str:
    """What the network was, and which part of it was not real."""
    rate = f"{setting.bandwidth} per worker" if setting.bandwidth else "unlimited bandwidth"
    delay = f", {setting.latency} one way" if setting.latency else ""
    if setting.network == "throttled":
        text = f"The link is <strong>EMULATED</strong> ({escape(rate + delay)}): every collective waits as long as "
        return f'<p class="warn">{text}such a link would take. No packet crossed a slow network.</p>'
    if setting.network == "none":
        return "<p>Link: the machine's own loopback, not slowed down.</p>"
    real = escape(rate + (delay if setting.kernel_latency else ""))
    text = f"Link: TCP between network namespaces of one machine, which the kernel holds to {real}."
    if not setting.latency or setting.kernel_latency:
        return f"<p>{text}</p>"
    emulated = f"The latency of {escape(setting.latency)} one way is <strong>EMULATED</strong>: every collective waits"
    return f'<p class="warn">{text} {emulated} as long as it would take.</p>'


def _lead(comparison: Comparison) -> str:
    """The one sentence that most readers came for."""
    rows = [(time, group) for group in comparison.groups if (time := _time_to_target(comparison, group)) is not None]
    if len(rows) < 2 or comparison.target is None:
        return ""
    time, best = min(rows, key=lambda row: row[0].median)
    goal = _marked("lead_target", comparison.target, _score(comparison.setting, comparison.target))
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


# ---- the summary table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """One number of a spec: how it is named, computed and shown."""

    key: str
    head: str
    value: Callable[[Comparison, Group], Spread | None]
    ratio: bool = False  # of two medians, so without a range


def _over(value: Callable[[Comparison, Group], Spread | None]) -> Callable[[Comparison, Group], Spread | None]:
    """The baseline's median over the spec's."""

    def ratio(comparison: Comparison, group: Group) -> Spread | None:
        plain = None if comparison.baseline is None else value(comparison, comparison.baseline)
        own = value(comparison, group)
        if plain is None or own is None or own.median == 0:
            return None
        return Spread.of([plain.median / own.median])

    return ratio


def _final(comparison: Comparison, group: Group) -> Spread | None:
    return group.spread(lambda run: None if run.end is None else run.end.score)


def _step_ms(comparison: Comparison, group: Group) -> Spread | None:
    spread = group.spread(lambda run: run.step_seconds)
    return None if spread is None else spread.scaled(1e3)


def _step_mb(comparison: Comparison, group: Group) -> Spread | None:
    spread = group.spread(lambda run: run.step_sent)
    return None if spread is None else spread.scaled(1e-6)


def _reached(comparison: Comparison, group: Group) -> list[Reached]:
    if comparison.target is None:
        return []
    return [found for run in group.finished if (found := run.reach(comparison.target)) is not None]


def _bound(comparison: Comparison, group: Group) -> str:
    return "≤ " if any(found.bound for found in _reached(comparison, group)) else ""


def _time_to_target(comparison: Comparison, group: Group) -> Spread | None:
    return Spread.of(found.seconds for found in _reached(comparison, group))


def _mb_to_target(comparison: Comparison, group: Group) -> Spread | None:
    spread = Spread.of(found.sent for found in _reached(comparison, group))
    return None if spread is None else spread.scaled(1e-6)


_COLUMNS = (
    _Column("score", "final {metric}", _final),
    _Column("ms_per_step", "ms / step", _step_ms),
    _Column("speedup", "speed-up", _over(_step_ms), ratio=True),
    _Column("mb_per_step", "MB / step", _step_mb),
    _Column("fewer_bytes", "fewer bytes", _over(_step_mb), ratio=True),
    _Column("seconds_to_target", "s to {target}", _time_to_target),
    _Column("target_speedup", "sooner", _over(_time_to_target), ratio=True),
    _Column("mb_to_target", "MB to {target}", _mb_to_target),
)


def _summary(comparison: Comparison) -> str:
    target = "target" if comparison.target is None else _score(comparison.setting, comparison.target)
    names = {"metric": comparison.setting.metric, "target": target}
    heads = ["spec", *(column.head.format(**names) for column in _COLUMNS)]
    rows = []
    for group, (colour, _) in zip(comparison.groups, plots.looks(comparison.groups), strict=True):
        cells = [_summary_cell(comparison, group, column) for column in _COLUMNS]
        rows.append(_join(_spec_cell(group, colour), *cells))
    return _table("Summary", heads, rows)


def _summary_cell(comparison: Comparison, group: Group, column: _Column) -> str:
    def show(value: float) -> str:
        if column.key == "score":
            return _score(comparison.setting, value)
        return f"{_digits(value)}&times;" if column.ratio else _digits(value)

    spread = column.value(comparison, group)
    before = _bound(comparison, group) if column.key.endswith("_to_target") else ""
    return _number(group.name, column.key, spread, show, before=before)


def _spec_cell(group: Group, colour: str) -> str:
    dot = f'<i class="dot" style="--light:{colour};--dark:{plots.THEME[colour]}"></i>'
    notes = [f"{len(group.finished)} seeds"] if len(group.finished) > 1 else []
    notes += [f"seed {run.seed} unfinished: step {run.last_step} of {run.planned}" for run in group.unfinished]
    lost = [run for run in group.finished if run.end and run.evals and Spread.of([run.end.score]) is None]
    notes += [f"seed {run.seed}: no finite score" for run in lost]
    small = "".join(f"<small>{escape(note)}</small>" for note in notes)
    return f'<th scope="row" class="dotted">{dot}{_name(group.name)}{small}</th>'


def _notes(comparison: Comparison) -> str:
    """What the numbers mean."""
    counted = "as the kernel counts them, packet headers and acknowledgements included"
    if comparison.setting.network != "netns":
        counted = "headers, indices and padding included"
    lines = [
        "Several seeds: the median, and below it [least, most]. The clock stands still during evaluations.",
        "<b>ms / step</b>: training time by the number of steps, the first ones included.",
        f"<b>MB</b>: million bytes that one worker sent, {counted}.",
        f"<b>Speed-up</b>, <b>fewer bytes</b>, <b>sooner</b>: the median of <code>{BASELINE}</code> over the spec's.",
        _target_note(comparison),
        _baseline_note(comparison),
        _unfinished_note(comparison),
    ]
    lengths = sorted({run.end.step for group in comparison.groups for run in group.finished if run.end})
    if len(lengths) > 1:
        lines.append(f"The runs differ in length, from {lengths[0]} to {lengths[-1]} steps.")
    return '<ul class="notes">' + "".join(f"<li>{line}</li>" for line in lines if line) + "</ul>"


def _target_note(comparison: Comparison) -> str:
    setter, target = comparison.setter, comparison.target
    if setter is None or target is None:
        return "No finished run has a score, so there is no equal score to compare times at."
    worst = "lowest" if comparison.setting.more_is_better else "highest"
    shown = _score(comparison.setting, target)
    return (
        f"<b>Equal {comparison.setting.metric}</b>: the target is {_marked('target', target, shown)}, the {worst} "
        f"final score of all finished runs ({_name(setter.spec)}, seed {setter.seed}), so that each of them reached "
        "it. Time and bytes are those of the first moment at the target, by straight lines between "
        "evaluations; ≤ means that the first evaluation was already there."
    )


def _baseline_note(comparison: Comparison) -> str:
    if comparison.baseline is not None:
        return ""
    tried = any(group.runs[0].spec == BASELINE for group in comparison.groups)
    why = f"the run of <code>{BASELINE}</code> is not finished" if tried else f"no run of <code>{BASELINE}</code> here"
    return f"Ratios are left out ({DASH}): there is {why}." if not tried else f"Ratios are left out ({DASH}): {why}."


def _unfinished_note(comparison: Comparison) -> str:
    runs = [run for group in comparison.groups for run in group.unfinished]
    if not runs:
        return ""
    names = ", ".join(f"{_name(run.spec)} (seed {run.seed})" for run in runs)
    return f"<b>Unfinished</b>, drawn dotted and left out of the numbers: {names}."


# ---- pictures ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Album:
    """Where the pictures go."""

    folder: Path
    prefix: str

    def show(self, figure: Figure, name: str, alt: str, caption: str) -> str:
        """Saves a figure as PNG, and gives it as HTML that holds the picture itself."""
        plots.save(figure, self.folder / f"{self.prefix}{name}.png")
        data = base64.b64encode(plots.svg(figure).encode()).decode()
        width, height = (round(72 * inches) for inches in figure.get_size_inches())
        source = f'src="data:image/svg+xml;base64,{data}" width="{width}" height="{height}"'
        return f'<figure><img {source} alt="{escape(alt)}"><figcaption>{caption}</figcaption></figure>'


def _curves(comparison: Comparison, album: _Album) -> str:
    metric = comparison.setting.metric
    names = ", ".join(group.name for group in comparison.groups)
    dotted = " Dotted line: the target." if comparison.target is not None else ""
    figures = []
    if any(math.isfinite(p.score) for group in comparison.groups for run in group.runs for p in run.curve):
        alt = f"Test {metric} over training time for {names}. {_ends(comparison)}"
        caption = f"{metric.capitalize()} over training time.{dotted}"
        figures.append(album.show(plots.score_by_time(comparison), "score-time", alt, caption))
    by_bytes = plots.score_by_bytes(comparison)
    if by_bytes is not None:
        alt = f"Test {metric} over bytes sent by one worker, on a logarithmic axis, for {names}."
        caption = f"{metric.capitalize()} over bytes sent.{dotted}"
        figures.append(album.show(by_bytes, "score-bytes", alt, caption))
    alt = f"Training loss over steps for {names}."
    caption = "Training loss over steps, of one worker's batches; means over blocks where there are many steps."
    figures.append(album.show(plots.loss_by_step(comparison), "loss", alt, caption))
    density = plots.density_by_step(comparison)
    if density is not None:
        alt = f"Density over steps, on a logarithmic axis, for the sparse methods among {names}."
        caption = "Achieved density: which part of the elements a sparse method sent."
        figures.append(album.show(density, "density", alt, caption))
    return f'<div class="figures">{_join(*figures)}</div>'


def _ends(comparison: Comparison) -> str:
    """The figure in words."""
    said = []
    for group in comparison.groups:
        score, time = _final(comparison, group), group.spread(lambda run: run.end.seconds if run.end else None)
        if score is not None and time is not None:
            shown = _score(comparison.setting, score.median)
            said.append(f"{group.name} ends at {shown} after {_digits(time.median)} seconds")
    return "; ".join(said) + "." if said else ""


def _step_time(comparison: Comparison, album: _Album) -> str:
    groups = [group for group in comparison.groups if group.finished]
    if not groups:
        return "<p>No run is finished.</p>"
    parts = [part for part in plots.PARTS if any(part in group.parts for group in groups)]
    alt = f"Stacked bars of the milliseconds of one step, split into {', '.join(parts)}, for "
    alt += ", ".join(group.name for group in groups) + ". The table holds the same numbers."
    caption = (
        "Compute is a step with no communication at all. The parts overlap (communication runs while gradients are "
        "still being computed), so a bar may be longer than the measured step, which is the upright mark."
    )
    if "not split" in parts:
        caption += " <i>Not split</i>: what a step took beyond compute, where our hook was not there to say why."
    figure = album.show(plots.step_time(comparison), "step-time", alt, caption)
    return f'<div class="figures">{figure}{_step_table(comparison, groups, parts)}</div>'


def _step_table(comparison: Comparison, groups: Sequence[Group], parts: Sequence[str]) -> str:
    shown = ["measured", *(part for part in parts if part != "not split")]  # which is the rest, as the bar shows
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
        f"Step time of each spec over that of {escape(chart.baseline)} on the same link, "
        f"{escape(chart.workload)} on {chart.workers} workers. Blue, below 1: faster. Red, above 1: slower."
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
    rows = []
    for comparison in comparisons:
        for group in comparison.groups:
            rows += [_run_row(comparison.setting, run) for run in group.runs]
    heads = ["spec", "seed", "state", "steps", "seconds", "MB sent", "score", "file"]
    cut = ", ".join(f"<code>{escape(name)}</code>" for name in stubs)
    note = f"<p>Cut off before the first line was written, so not shown: {cut}.</p>" if cut else ""
    expressions = dict.fromkeys((run.spec, run.expression) for c in comparisons for g in c.groups for run in g.runs)
    meanings = _join(*(f"<dt>{escape(s)}</dt><dd><code>{escape(e)}</code></dd>" for s, e in expressions if s != e))
    return _join("<h2>Runs</h2>", _table("Runs", heads, rows), note, f"<dl>{meanings}</dl>" if meanings else "")


def _run_row(setting: Setting, run: Run) -> str:
    score = run.curve[-1].score if run.curve else None
    state = "finished" if run.finished else "unfinished"

    def cell(key: str, value: float | None, show: Callable[[float], str]) -> str:
        return _number(run.spec, key, Spread.of([value]), show, more={"data-file": run.file})

    return _join(
        f'<th scope="row">{_name(run.spec)}</th>',
        cell("run_seed", run.seed, lambda v: f"{v:.0f}"),
        f'<td class="{state}" data-spec="{escape(run.spec)}" data-file="{escape(run.file)}">{state}</td>',
        cell("run_steps", run.last_step, lambda v: f"{v:.0f} of {run.planned}"),
        cell("run_seconds", run.seconds, _digits),
        cell("run_mb", None if run.sent is None else run.sent / 1e6, _digits),
        cell("run_score", score, lambda v: _score(setting, v)),
        f'<td class="text">{escape(run.file)}</td>',
    )


def _commands(runs: Sequence[Run]) -> str:
    commands = dict.fromkeys(run.command for run in runs)
    return "<h2>Commands</h2>" + "".join(f"<pre><code>{escape(command)}</code></pre>" for command in commands)


def _environment(runs: Sequence[Run]) -> str:
    """Versions and the machine; where runs differ, every value that occurred."""
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        about = (
            *run.environment,
            ("parameters of the model", f"{run.parameters:,}"),
            ("batch", str(run.setting.batch)),
        )
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
) -> str:
    names = {"data-spec": spec, "data-key": key, **(more or {})}
    if spread is None:
        return f"<td{_attributes(names)}>{DASH}</td>"
    names["data-value"] = repr(spread.median)
    if spread.count > 1:
        names |= {"data-min": repr(spread.low), "data-max": repr(spread.high)}
    if ranged and show(spread.low) != show(spread.high):
        after = f"<small>[{show(spread.low)}, {show(spread.high)}]</small>{after}"
    return f"<td{_attributes(names)}>{before}{show(spread.median)}{after}</td>"


def _marked(key: str, value: float, shown: str, spec: str | None = None) -> str:
    names = {} if spec is None else {"data-spec": spec}
    return f"<b{_attributes(names | {'data-key': key, 'data-value': repr(value)})}>{shown}</b>"


def _name(spec: str) -> str:
    """A spec that breaks where a reader would break it."""
    return escape(spec).replace("(", "(<wbr>")


def _attributes(names: dict[str, str]) -> str:
    return "".join(f' {name}="{escape(value)}"' for name, value in names.items())


def _table(label: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col"{_TEXT.get(name, "")}>{escape(name)}</th>' for name in heads)
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if heads else ""
    region = f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">'
    return f"{region}<table>{top}<tbody>\n{body}</tbody></table></div>"


def _digits(value: float) -> str:
    """Three digits.

    >>> _digits(1234.5), _digits(12.345), _digits(0.012345), _digits(0)
    ('1,234', '12.3', '0.0123', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".") if value else "0"


def _score(setting: Setting, value: float) -> str:
    return f"{100 * value:.2f} %" if setting.metric == "accuracy" else f"{value:.2f}"


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
thead th { color: var(--muted); font-weight: 500; font-size: .8125rem; vertical-align: bottom; white-space: nowrap; }
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
.unfinished { color: var(--edge); }
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
