"""Pictures of results, drawn with matplotlib without a screen.

A figure is drawn once and saved twice: as PNG, on white, and as SVG whose colours follow the reader's light or dark
mode. All figures of one comparison give a spec the same colour.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tersegrad.comm.units import parse_rate, show_bytes
from tersegrad.lab.results import BASELINE, Cell, Comparison, Group, Run, read_cells

INK, MUTED, GRID, PLAIN = "#1e2329", "#59626d", "#dde1e6", "#6b7480"
SERIES = ("#2166c4", "#d4661a", "#2c8a57", "#8a4fb8", "#c43a52", "#128c98", "#8a6424", "#cf559a")
PARTS = {"compute": "#a9b1bb", "encode": "#3b76cb", "wait": "#e2a33b", "decode": "#4f9c6c", "not split": "#cfd4da"}
THEME = {  # light -> dark
    INK: "#e8eaed", MUTED: "#a3abb5", GRID: "#363c44", PLAIN: "#9aa3ae",
    "#2166c4": "#74aef5", "#d4661a": "#f39a58", "#2c8a57": "#6cc795", "#8a4fb8": "#c39be6",
    "#c43a52": "#f0808f", "#128c98": "#5cc6d0", "#8a6424": "#cfa85f", "#cf559a": "#f094c4",
    "#a9b1bb": "#717a86", "#3b76cb": "#5f97e6", "#e2a33b": "#d99a35", "#4f9c6c": "#5cae7c", "#cfd4da": "#464d57",
}  # fmt: skip
DASHES = ("-", "--", "-.")  # a second and third spec of one colour
_MAX_POINTS = 100  # of a loss curve
_WIDTH = 5.0  # inches; text of 10 points stays readable on a phone

Point = tuple[int, float, float]  # step, x, y


def demo(results: dict[str, list[dict[str, Any]]], title: str, path: Path) -> Path:
    """Accuracy against time, and against bytes sent by one worker."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for spec, events in results.items():
        evals = [e for e in events if e["event"] == "eval"]
        score = [100 * e["score"] for e in evals]
        by_time.plot([e["seconds"] for e in evals], score, marker="o", markersize=3, label=spec)
        by_bytes.plot([e["sent"] / 1e6 for e in evals], score, marker="o", markersize=3)
    by_time.set_xlabel("training time, seconds")
    by_time.set_ylabel("test accuracy, %")
    by_time.legend(fontsize="small")
    by_bytes.set_xlabel("sent by one worker, MB")
    for axes in (by_time, by_bytes):
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    return path


# ---- figures of a comparison ---------------------------------------------------------------------


def score_by_time(comparison: Comparison) -> Figure:
    """Test score against training time."""
    with style():
        figure, axes = _scores(comparison, lambda run: [(p.step, p.seconds, p.score) for p in run.curve])
        ends = [run.curve[-1].seconds for g in comparison.groups for run in g.runs if run.curve]
        wide = bool(ends) and max(ends) > 8 * min(ends) > 0
        if wide:
            log_scale(axes.xaxis, lambda v: f"{v:g}")
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel("training time, seconds" + (" (log)" if wide else ""))
    return figure


def score_by_bytes(comparison: Comparison) -> Figure | None:
    """Test score against bytes sent; None where nobody counted."""
    points = _positive(lambda run: [(p.step, p.sent, p.score) for p in run.curve if p.sent is not None])
    if not any(points(run) for group in comparison.groups for run in group.runs):
        return None
    with style():
        figure, axes = _scores(comparison, points)
        log_scale(axes.xaxis, show_bytes)
        axes.set_xlabel("sent by one worker (log)")
    return figure


def loss_by_step(comparison: Comparison) -> Figure:
    """Training loss of rank 0, in means over blocks of steps where there are many."""
    with style():
        points = lambda run: _blocks([(s.step, s.step, s.loss) for s in run.steps])  # noqa: E731
        figure, axes = _lines(comparison.groups, looks(comparison.groups), points)
        axes.set_xlim(left=0)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
    return figure


def density_by_step(comparison: Comparison) -> Figure | None:
    """Which part of the elements the sparse methods sent; None where there is nothing to show."""
    shown = [
        (group, look)
        for group, look in zip(comparison.groups, looks(comparison.groups), strict=True)
        if any(s.density not in (None, 1) for run in group.runs for s in run.steps)
    ]
    if not shown:
        return None
    with style():
        points = _positive(lambda run: [(s.step, s.step, s.density) for s in run.steps if s.density is not None])
        figure, axes = _lines([group for group, _ in shown], [look for _, look in shown], points)
        log_scale(axes.yaxis, lambda v: f"{100 * v:g} %")
        axes.set_xlim(left=0)
        axes.set_xlabel("step")
        axes.set_ylabel("elements sent (log)")
    return figure


def step_time(comparison: Comparison) -> Figure:
    """What a step's time was for, stacked, with the measured time as a mark."""
    groups = [group for group in comparison.groups if group.finished]
    with style():
        figure = new_figure(0.75 + 0.38 * len(groups))
        axes = figure.subplots()
        for row, group in enumerate(groups):
            left = 0.0
            for part, seconds in group.parts.items():
                axes.barh(row, 1000 * seconds.median, left=left, height=0.56, color=PARTS[part])
                left += 1000 * seconds.median
            measured = group.spread(lambda run: run.step_seconds)
            if measured is not None:
                axes.plot(1000 * measured.median, row, "|", color=INK, markersize=17, markeredgewidth=2.2)
        axes.set_yticks(range(len(groups)), [_short(group.name, 28) for group in groups])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("milliseconds per step")
        legend(figure, *_parts_legend(groups))
    return figure


def looks(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Colour and line style of each spec: grey is the baseline."""
    found, taken = [], 0
    for group in groups:
        if group.runs[0].spec == BASELINE:
            found.append((PLAIN, DASHES[0]))
            continue
        found.append((SERIES[taken % len(SERIES)], DASHES[taken // len(SERIES) % len(DASHES)]))
        taken += 1
    return found


# ---- the map -------------------------------------------------------------------------------------


def heat_map(cells: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Step time against the best dense baseline's, by spec and bandwidth: blue wins, red loses.

    A cell is as in ``map.json``: ``{"spec": "topk", "bandwidth": "100Mbit", "ms": 123.4, "ratio": 0.21}``.
    """
    return save(map_figure(read_cells(cells)), path)


def map_figure(cells: Sequence[Cell], baseline: str = "best dense") -> Figure:
    """The map, before it is saved."""
    specs, bandwidths = map_axes(cells)
    widest = max(2.0, *(max(c.ratio, 1 / c.ratio) for c in cells))
    norm, palette = LogNorm(1 / widest, widest), mpl.colormaps["RdBu_r"]
    with style():
        figure = new_figure(1.1 + 0.46 * len(specs), width=max(_WIDTH, 2.2 + 0.72 * len(bandwidths)))
        axes = figure.subplots()
        axes.grid(visible=False)
        for cell in cells:
            x, y = bandwidths.index(cell.bandwidth), specs.index(cell.spec)
            colour = palette(0.5 + 0.82 * (float(norm(cell.ratio)) - 0.5))  # the palette's ends are nearly black
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, linewidth=0))
            axes.text(x, y, show_ratio(cell.ratio), ha="center", va="center", color=_readable_on(colour))
        axes.set_xlim(-0.5, len(bandwidths) - 0.5)
        axes.set_ylim(len(specs) - 0.5, -0.5)
        axes.set_xticks(range(len(bandwidths)), [b or "no limit" for b in bandwidths])
        axes.set_yticks(range(len(specs)), [_short(spec, 28) for spec in specs])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel("bandwidth of the link")
        figure.suptitle(_short(f"step time / {baseline} (below 1, blue: faster)", 60))  # of the figure: labels are wide
    return figure


def map_axes(cells: Sequence[Cell]) -> tuple[list[str], list[str | None]]:
    """Specs in their order, bandwidths from slow to fast."""
    specs = list(dict.fromkeys(cell.spec for cell in cells))
    bandwidths = dict.fromkeys(cell.bandwidth for cell in cells)
    return specs, sorted(bandwidths, key=lambda b: math.inf if b is None else parse_rate(b))


def show_ratio(ratio: float) -> str:
    """Two digits.

    >>> show_ratio(0.2149), show_ratio(1.0), show_ratio(12.3)
    ('0.21', '1.0', '12')
    """
    return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


# ---- saving --------------------------------------------------------------------------------------


def save(figure: Figure, path: Path) -> Path:
    """As PNG, on white."""
    figure.savefig(path, dpi=160, facecolor="white")
    return path


def svg(figure: Figure) -> str:
    """As SVG on nothing, in colours that follow the reader's light or dark mode."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": "tersegrad"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    used = [colour for colour in THEME if colour in text]
    light = "".join(f"--c{i}:{colour};" for i, colour in enumerate(used))
    dark = "".join(f"--c{i}:{THEME[colour]};" for i, colour in enumerate(used))
    for i, colour in enumerate(used):
        text = text.replace(colour, f"var(--c{i})")
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda found: found[1] + style, text, count=1)


# ---- parts ---------------------------------------------------------------------------------------


@contextmanager
def style() -> Iterator[None]:
    """Everything drawn inside looks the same."""
    quiet: dict[Any, Any] = {
        "font.size": 10, "axes.titlesize": 10, "legend.fontsize": 9.5, "text.parse_math": False,
        "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
        "axes.edgecolor": GRID, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True,
        "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
        "axes.linewidth": 0.8, "lines.solid_capstyle": "round", "legend.frameon": False,
    }  # fmt: skip
    with mpl.rc_context(quiet):
        yield


def new_figure(height: float, width: float = _WIDTH) -> Figure:
    """An empty one, in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _scores(comparison: Comparison, points: Callable[[Run], list[Point]]) -> tuple[Figure, Axes]:
    figure, axes = _lines(comparison.groups, looks(comparison.groups), points)
    metric = comparison.setting.metric
    if metric == "accuracy":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    scores = [y for g in comparison.groups for run in g.runs for _, _, y in points(run) if math.isfinite(y)]
    wide = metric == "perplexity" and bool(scores) and max(scores) > 3 * min(scores) > 0
    if wide:
        log_scale(axes.yaxis, lambda v: f"{v:g}")
    axes.set_ylabel(f"test {metric}" + (" (log)" if wide else ""))
    if comparison.target is not None:
        axes.axhline(comparison.target, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2.5)), zorder=1)
    return figure, axes


def _lines(
    groups: Sequence[Group], looks: Sequence[tuple[str, str]], points: Callable[[Run], list[Point]]
) -> tuple[Figure, Axes]:
    """Per spec the median of the finished runs in a band from the least to the most; unfinished runs are dotted."""
    figure = new_figure(2.9)
    axes = figure.subplots()
    handles: list[Artist] = []
    for group, (colour, dashes) in zip(groups, looks, strict=True):
        (handle,) = axes.plot([], [], color=colour, linestyle=dashes, linewidth=2)
        handles.append(handle)
        for run in group.unfinished:
            _, x, y = _columns(points(run))
            axes.plot(x, y, color=colour, linewidth=1.3, linestyle=(0, (1, 1.6)))
        _median_line(axes, [points(run) for run in group.finished], colour, dashes)
    legend(figure, handles, [group.name for group in groups])
    return figure, axes


def _median_line(axes: Axes, runs: list[list[Point]], colour: str, dashes: str) -> None:
    """Over the steps that all runs have; runs that have none in common are drawn one by one."""
    common = set.intersection(*({step for step, _, _ in run} for run in runs)) if runs else set()
    if not common:
        for run in runs:
            _, x, y = _columns(run)
            axes.plot(x, y, color=colour, linestyle=dashes, linewidth=1.3)
        return
    kept = [[point for point in run if point[0] in common] for run in runs]
    x = [_median([point[1] for point in same]) for same in zip(*kept, strict=True)]
    ys = [[point[2] for point in same] for same in zip(*kept, strict=True)]
    marker = "o" if len(x) <= 25 else ""
    axes.plot(x, [_median(y) for y in ys], color=colour, linestyle=dashes, linewidth=1.9, marker=marker, markersize=3)
    if len(runs) > 1:
        low, high = [min(y) for y in ys], [max(y) for y in ys]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def _median(values: Sequence[float]) -> float:
    """NaN if one of them is."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if any(math.isnan(v) for v in ordered):
        return math.nan
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _columns(points: list[Point]) -> tuple[list[int], list[float], list[float]]:
    return [p[0] for p in points], [p[1] for p in points], [p[2] for p in points]


def _positive(points: Callable[[Run], list[Point]]) -> Callable[[Run], list[Point]]:
    """What a logarithmic axis can show."""
    return lambda run: [(step, x, y) for step, x, y in points(run) if x > 0 and y > 0]


def _blocks(points: list[Point]) -> list[Point]:
    """Means over blocks of equal length, placed at their last step."""
    size = math.ceil(len(points) / _MAX_POINTS) or 1
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(b[-1][0], b[-1][1], sum(p[2] for p in b) / len(b)) for b in blocks]


def log_scale(axis: Axis, show: Callable[[float], str]) -> None:
    """A logarithmic axis with plain numbers."""
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")  # type: ignore[attr-defined]
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1.0,) if decades > 3.2 else (1.0, 3.0) if decades > 1.6 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs) if decades > 0.6 else MaxNLocator(5))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: show(v)))


def legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """Above the axes, in as many columns as fit; the figure grows by its height."""
    labels = [_short(name, 28) for name in names]
    if len(set(labels)) < len(labels):
        labels = [_short(name, 56) for name in names]
    even = dict.fromkeys(math.ceil(len(labels) / rows) for rows in range(1, len(labels) + 1))
    columns = next((n for n in even if _legend_width(labels, n) <= 72 * _WIDTH), 1)
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.2, columnspacing=1.3)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    """About how many points a legend takes; names go down the columns, of which the first may be one longer."""
    return sum(32 + 5.3 * max(map(len, column)) for column in np.array_split(np.array(labels), columns))


def _parts_legend(groups: Sequence[Group]) -> tuple[list[Artist], list[str]]:
    present = {part for group in groups for part in group.parts}
    names = [part for part in PARTS if part in present]
    handles: list[Artist] = [Patch(color=PARTS[name]) for name in names]
    handles.append(Line2D([], [], color=INK, marker="|", linestyle="", markersize=9, markeredgewidth=2.2))
    return handles, [*names, "measured"]


def _short(text: str, most: int) -> str:
    """With the middle left out."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _readable_on(colour: tuple[float, float, float, float]) -> str:
    red, green, blue, _ = colour
    return "#101418" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"
