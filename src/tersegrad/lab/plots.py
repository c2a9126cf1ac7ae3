"""Figures of results, drawn with matplotlib: common style, saving, bars of step times, the map. Curves: ``curves.py``.

Every figure is saved twice: as PNG on white, and as SVG whose colours follow the reader's light or dark mode. A spec
has the same colour in all figures of a comparison.
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
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tersegrad.comm.units import parse_rate
from tersegrad.lab.results import BASELINE, Cell, Comparison, Group, read_cells

INK, MUTED, GRID, PLAIN, PAPER = "#1e2329", "#59626d", "#dde1e6", "#6b7480", "#fefefe"
SERIES = ("#2166c4", "#d4661a", "#2c8a57", "#8a4fb8", "#c43a52", "#128c98", "#8a6424", "#cf559a")
PARTS = {"compute": "#a9b1bb", "encode": "#3b76cb", "wait": "#e2a33b", "decode": "#4f9c6c", "not split": "#cfd4da"}
THEME = {  # light -> dark
    INK: "#e8eaed", MUTED: "#a3abb5", GRID: "#363c44", PLAIN: "#9aa3ae", PAPER: "#16191d",
    "#2166c4": "#74aef5", "#d4661a": "#f39a58", "#2c8a57": "#6cc795", "#8a4fb8": "#c39be6",
    "#c43a52": "#f0808f", "#128c98": "#5cc6d0", "#8a6424": "#cfa85f", "#cf559a": "#f094c4",
    "#a9b1bb": "#717a86", "#3b76cb": "#5f97e6", "#e2a33b": "#d99a35", "#4f9c6c": "#5cae7c", "#cfd4da": "#464d57",
}  # fmt: skip
DASHES = ("-", "--", "-.")  # a second and third spec of one colour
_WIDTH = 5.0  # inches; text of 10 points stays readable on a phone


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


def step_time(comparison: Comparison) -> Figure:
    """The phases of a step as stacked bars, with the measured time of the step as a mark."""
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
        axes.set_yticks(range(len(groups)), [short(group.name, 28) for group in groups])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("milliseconds per step")
        legend(figure, *_parts_legend(groups))
    return figure


def looks(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Colour and line style of each spec; the baseline is grey."""
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
    """Step time divided by that of the best dense baseline, by spec and bandwidth: blue is faster, red is slower.

    A cell is as in ``map.json``: ``{"spec": "topk", "bandwidth": "100Mbit", "ms": 123.4, "ratio": 0.21}``.
    """
    return save(map_figure(read_cells(cells)), path)


def map_figure(cells: Sequence[Cell], baseline: str = "best dense") -> Figure:
    """The same as a figure."""
    specs, bandwidths = map_axes(cells)
    widest = max(2.0, *(max(c.ratio, 1 / c.ratio) for c in cells))
    norm, palette = LogNorm(1 / widest, widest), mpl.colormaps["RdBu_r"]
    with style():
        figure = new_figure(1.1 + 0.46 * len(specs), width=max(_WIDTH, 2.2 + 0.72 * len(bandwidths)))
        axes = figure.subplots()
        axes.grid(visible=False)
        for cell in cells:
            x, y = bandwidths.index(cell.bandwidth), specs.index(cell.spec)
            colour = palette(0.5 + 0.82 * (float(norm(cell.ratio)) - 0.5))  # without the palette's dark ends
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, linewidth=0))
            axes.text(x, y, show_ratio(cell.ratio), ha="center", va="center", color=_readable_on(colour))
        axes.set_xlim(-0.5, len(bandwidths) - 0.5)
        axes.set_ylim(len(specs) - 0.5, -0.5)
        axes.set_xticks(range(len(bandwidths)), [b or "no limit" for b in bandwidths])
        axes.set_yticks(range(len(specs)), [short(spec, 28) for spec in specs])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_xlabel("bandwidth of the link")
        figure.suptitle(short(f"step time / {baseline} (below 1, blue: faster)", 60))  # wider than the axes
    return figure


def map_axes(cells: Sequence[Cell]) -> tuple[list[str], list[str | None]]:
    """Specs in the order of the cells, bandwidths from slow to fast."""
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
    """Save as PNG on white."""
    figure.savefig(path, dpi=160, facecolor="white")
    return path


def svg(figure: Figure) -> str:
    """SVG with a transparent background and colours that follow the reader's light or dark mode."""
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
    """The common style; a figure must be drawn inside this context."""
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
    """An empty figure; sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def log_scale(axis: Axis, show: Callable[[float], str]) -> None:
    """Make an axis logarithmic, with plain numbers at its ticks."""
    (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")  # type: ignore[attr-defined]
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs = (1.0,) if decades > 3.2 else (1.0, 3.0) if decades > 1.6 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs) if decades > 0.6 else MaxNLocator(5))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: show(v)))


def legend(figure: Figure, handles: Sequence[Artist], names: Sequence[str]) -> None:
    """A legend above the axes, in as many columns as fit; the figure becomes higher by it."""
    labels = [short(name, 28) for name in names]
    if len(set(labels)) < len(labels):
        labels = [short(name, 56) for name in names]
    even = dict.fromkeys(math.ceil(len(labels) / rows) for rows in range(1, len(labels) + 1))
    columns = next((n for n in even if _legend_width(labels, n) <= 72 * _WIDTH), 1)
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.2, columnspacing=1.3)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    """Approximate width in points. Names fill the columns from top to bottom, the first columns first."""
    return sum(32 + 5.3 * max(map(len, column)) for column in np.array_split(np.array(labels), columns))


def _parts_legend(groups: Sequence[Group]) -> tuple[list[Artist], list[str]]:
    present = {part for group in groups for part in group.parts}
    names = [part for part in PARTS if part in present]
    handles: list[Artist] = [Patch(color=PARTS[name]) for name in names]
    handles.append(Line2D([], [], color=INK, marker="|", linestyle="", markersize=9, markeredgewidth=2.2))
    return handles, [*names, "measured"]


def short(text: str, most: int) -> str:
    """At most so many characters, with the middle left out."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _readable_on(colour: tuple[float, float, float, float]) -> str:
    red, green, blue, _ = colour
    return "#101418" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"
