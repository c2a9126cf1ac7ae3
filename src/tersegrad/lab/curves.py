"""Figures of curves: scores, losses and densities of runs, and the step times that ``tersegrad plan`` predicts.

The name of each curve stands at its end, so there is no legend. Names are moved apart where they would overlap; a thin
line then leads from the curve to its name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter

from tersegrad.comm.units import show_bytes
from tersegrad.lab import plots
from tersegrad.lab.results import Comparison, Group, Run

Point = tuple[int, float, float]  # step, x, y
Points = Callable[[Run], list[Point]]

_HEIGHT = 2.9  # inches
_MAX_POINTS = 100  # of a loss curve
_LINEAR = 6  # an axis is linear as long as its values differ by no more than this factor
_LINE_OF_TEXT = 17  # characters of a name in one line; longer names take two
_FAR = 0.13  # inches from a curve's end to its name, above which a thin line connects them
_GAP = 0.07  # inches between a curve's end and a name beside it


# ---- figures of a comparison ---------------------------------------------------------------------


def score_by_step(comparison: Comparison) -> Figure:
    """Score against steps."""
    with plots.style():
        axes, ends = _scores(comparison, lambda run: [(p.step, p.step, p.score) for p in run.curve])
        axes.set_xlim(left=0)
        axes.set_xlabel("step")
        return name_curves(axes, ends)


def score_by_time(comparison: Comparison) -> Figure | None:
    """Score against training time, which is predicted for simulated runs; None where no time is known."""
    unit, length = time_unit(max((run.seconds or 0 for run in comparison.runs), default=0))
    label = f"training time, {unit}"
    if comparison.setting.simulated:
        label = f"predicted {label}"
    return _scores_by(
        comparison,
        lambda run: [(p.step, p.seconds / length, p.score) for p in run.curve if p.seconds is not None],
        lambda v: f"{v:g}",
        label,
    )


def score_by_bytes(comparison: Comparison) -> Figure | None:
    """Score against bytes sent; None where they were not counted."""
    points = lambda run: [(p.step, p.sent, p.score) for p in run.curve if p.sent is not None]  # noqa: E731
    return _scores_by(comparison, points, show_bytes, "sent by one worker")


def loss_by_step(comparison: Comparison) -> Figure:
    """Training loss against steps; with many steps, each point is the mean of several."""
    with plots.style():
        points = lambda run: _blocks([(s.step, s.step, s.loss) for s in run.steps])  # noqa: E731
        axes, ends = _draw_groups(comparison.groups, plots.looks(comparison.groups), points)
        axes.set_xlim(left=0)
        axes.set_xlabel("step")
        runs = [[y for _, _, y in _finite(points(run))] for group in comparison.groups for run in group.sound]
        peaks, lows = [max(ys) for ys in runs if ys], [min(ys) for ys in runs if ys]
        wide = bool(peaks) and min(lows) > 0 and max(peaks) > _LINEAR * min(peaks)
        if wide:
            plots.log_scale(axes.yaxis, lambda v: f"{v:g}")
        axes.set_ylabel("training loss" + (" (log)" if wide else ""))
        return name_curves(axes, ends)


def density_by_step(comparison: Comparison) -> Figure | None:
    """Share of the elements that sparse methods sent, against steps; None if there is no sparse method."""
    shown = [
        (group, look)
        for group, look in zip(comparison.groups, plots.looks(comparison.groups), strict=True)
        if any(s.density not in (None, 1) for run in group.runs for s in run.steps)
    ]
    if not shown:
        return None
    with plots.style():
        points = _positive(lambda run: [(s.step, s.step, s.density) for s in run.steps if s.density is not None])
        axes, ends = _draw_groups([group for group, _ in shown], [look for _, look in shown], points)
        plots.log_scale(axes.yaxis, lambda v: f"{100 * v:g} %")
        axes.set_xlim(left=0)
        axes.set_xlabel("step")
        axes.set_ylabel("elements sent (log)")
        return name_curves(axes, ends)


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for times up to this long, and its length in seconds.

    >>> time_unit(90), time_unit(3600), time_unit(1e5)
    (('seconds', 1.0), ('minutes', 60.0), ('hours', 3600.0))
    """
    return ("seconds", 1.0) if seconds < 600 else ("minutes", 60.0) if seconds < 2.5 * 3600 else ("hours", 3600.0)


# ---- the planner's figure ------------------------------------------------------------------------


def draw(workers: Sequence[int], steps: Mapping[str, Sequence[float]], compute: float, title: str, path: Path) -> Path:
    """Predicted milliseconds of a step against the number of workers; dotted: a step without communication."""
    with plots.style():
        axes = plots.new_figure(3.4).subplots()
        axes.margins(x=0.02)
        ends = []
        taken = 0
        for spec, seconds in steps.items():
            colour = plots.PLAIN if spec == "none" else plots.SERIES[taken % len(plots.SERIES)]
            dashes = plots.DASHES[0 if spec == "none" else taken // len(plots.SERIES) % len(plots.DASHES)]
            taken += spec != "none"
            axes.plot(workers, [1e3 * s for s in seconds], color=colour, linestyle=dashes, linewidth=1.9)
            ends.append(End(spec, colour, workers[-1], 1e3 * seconds[-1]))
        if compute > 0:
            axes.axhline(1e3 * compute, color=plots.MUTED, linewidth=0.9, linestyle=(0, (1, 2.5)), zorder=1)
            ends.append(End("no communication", plots.MUTED, workers[-1], 1e3 * compute))
        plots.log_scale(axes.yaxis, lambda v: f"{v:g}")
        plots.log_scale(axes.xaxis, lambda v: f"{v:g}")
        powers = [n for n in workers if n & (n - 1) == 0]
        axes.set_xticks(powers[::-2] if len(powers) > 7 else powers, minor=False)  # of many, every second
        axes.set_xlabel(f"workers (log)   {title}")
        axes.set_ylabel("predicted ms per step (log)")
        return plots.save(name_curves(axes, ends), path)


# ---- drawing runs --------------------------------------------------------------------------------


def _scores_by(comparison: Comparison, points: Points, show: Callable[[float], str], label: str) -> Figure | None:
    """Scores against time or bytes, which grow at a different pace for each spec."""
    runs = [run for run in comparison.runs if points(run)]
    if not runs:
        return None
    counted = [run for group in comparison.groups for run in group.sound if points(run)] or runs
    ends = [points(run)[-1][1] for run in counted]
    wide = max(ends) > _LINEAR * min(ends) > 0
    with plots.style():
        axes, named = _scores(comparison, _positive(points, y=False) if wide else points)
        if wide:
            plots.log_scale(axes.xaxis, show)
        else:
            axes.set_xlim(left=0)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: show(v) if v else "0"))
        axes.set_xlabel(label + (" (log)" if wide else ""))
        _make_room(axes, len(named), comparison)
        return name_curves(axes, named)


def _make_room(axes: Axes, names: int, comparison: Comparison) -> None:
    """Widen the range of scores on the better side, where curves end, for names in the axes."""
    scale = axes.yaxis.get_transform()
    low, high = scale.transform(np.array(axes.get_ylim()))
    room = min(0.25, 0.04 * names) * (high - low)
    limits = [low, high + room] if comparison.setting.higher_is_better else [low - room, high]
    axes.set_ylim(*scale.inverted().transform(np.array(limits)))
    if comparison.percent:
        axes.set_yticks([tick for tick in axes.get_yticks() if tick < 1.001 and tick >= axes.get_ylim()[0]])


def _scores(comparison: Comparison, points: Points) -> tuple[Axes, "list[End]"]:
    axes, ends = _draw_groups(comparison.groups, plots.looks(comparison.groups), points)
    if comparison.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g} %"))
    low, high = axes.dataLim.intervaly
    wide = not comparison.setting.higher_is_better and high > _LINEAR * low > 0
    if wide:
        plots.log_scale(axes.yaxis, lambda v: f"{v:g}")
    whose = "" if comparison.setting.simulated else "test "
    axes.set_ylabel(f"{whose}{plots.short(comparison.setting.metric, 28)}" + (" (log)" if wide else ""))
    if comparison.target is not None and comparison.shows_target:
        axes.axhline(comparison.target, color=plots.MUTED, linewidth=0.9, linestyle=(0, (1, 2.5)), zorder=1)
    return axes, ends


def _draw_groups(groups: Sequence[Group], looks: Sequence[tuple[str, str]], points: Points) -> tuple[Axes, "list[End]"]:
    """For each spec the median of its runs, in a band from their minimum to their maximum; other runs as thin lines.

    Runs that diverged end in a cross, unfinished ones are dotted. A run that diverged is cut off where it leaves the
    range of the others: next to a loss of 1e30 they would all look like one straight line.
    """
    axes = plots.new_figure(_HEIGHT).subplots()
    axes.margins(x=0.02, y=0.09)
    inside = _cut_off(groups, points)
    ends = []
    for group, (colour, dashes) in zip(groups, looks, strict=True):
        curve = _median_curve(axes, [points(run) for run in group.sound], colour, dashes)
        lost = [_finite(inside(run)) for run in group.diverged]
        open_ = [_finite(inside(run)) for run in group.unfinished]
        for line in lost:
            axes.plot(*_xy(line), color=colour, linewidth=1.2)
            axes.plot(*_xy(line[-1:]), color=colour, marker="x", markersize=6, markeredgewidth=1.6)
        for line in open_:
            marker = "o" if len(line) == 1 else ""
            axes.plot(*_xy(line), color=colour, linewidth=1.3, linestyle=(0, (1, 1.6)), marker=marker, markersize=3)
        for said, lines in (("", [curve]), (", diverged", lost), (", unfinished", open_)):
            last = max((line[-1] for line in lines if line), default=None)
            if last is not None:
                ends.append(End(group.name, colour, last[1], last[2], said))
                break
    return axes, ends


def _cut_off(groups: Sequence[Group], points: Points) -> Points:
    """The points of a run; if it diverged, up to where it leaves the range of those that did not."""
    runs = [run for group in groups for run in group.runs]
    values = [y for run in runs if run.diverged is None for _, _, y in _finite(points(run))]
    firsts = [line[0][2] for run in runs if (line := _finite(points(run)))]
    if not values:  # all diverged
        near = 10 * max(map(abs, firsts), default=0)
        values = [y for run in runs for _, _, y in _finite(points(run)) if abs(y) <= near]
    low, high = min(values + firsts, default=0), max(values + firsts, default=0)

    def inside(run: Run) -> list[Point]:
        if run.diverged is None:
            return points(run)
        kept = []
        for step, x, y in points(run):
            kept.append((step, x, min(max(y, low), high) if math.isfinite(y) else y))
            if y < low or y > high:
                break
        return kept

    return inside


def _median_curve(axes: Axes, runs: list[list[Point]], colour: str, dashes: str) -> list[Point]:
    """Draw the median at the steps that all runs have, and the rest of longer runs as thin lines; return the median."""
    runs = [run for run in runs if run]
    common = set.intersection(*({step for step, _, _ in run} for run in runs)) if runs else set()
    last = max(common, default=0)
    for run in runs:
        tail = [point for point in run if point[0] >= last or not common]
        axes.plot(*_xy(tail if len(tail) > 1 else []), color=colour, linestyle=dashes, linewidth=1.2)
    if not common:
        return _finite(max(runs, key=len)) if runs else []
    same = list(zip(*([point for point in run if point[0] in common] for run in runs), strict=True))
    median = [(at[0][0], _median([p[1] for p in at]), _median([p[2] for p in at])) for at in same]
    marker = "o" if len(median) <= 25 else ""
    axes.plot(*_xy(median), color=colour, linestyle=dashes, linewidth=1.9, marker=marker, markersize=3)
    if len(runs) > 1:
        low, high = (
            [np.nan if math.isnan(m[2]) else pick(p[2] for p in at) for m, at in zip(median, same, strict=True)]
            for pick in (min, max)
        )
        axes.fill_between(_xy(median)[0], low, high, color=colour, alpha=0.18, linewidth=0)
    return _finite(median)


def _median(values: Sequence[float]) -> float:
    """NaN if one of them is."""
    return float(np.median(values))


def _xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [p[1] for p in points], [p[2] for p in points]


def _finite(points: Sequence[Point]) -> list[Point]:
    return [p for p in points if math.isfinite(p[1]) and math.isfinite(p[2])]


def _positive(points: Points, y: bool = True) -> Points:
    """The points that a logarithmic axis can show."""
    return lambda run: [p for p in points(run) if p[1] > 0 and (p[2] > 0 or not y)]


def _blocks(points: list[Point]) -> list[Point]:
    """Means over blocks of steps, each placed at its last step."""
    size = math.ceil(len(points) / _MAX_POINTS) or 1
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(b[-1][0], b[-1][1], sum(p[2] for p in b) / len(b)) for b in blocks]


# ---- names at the ends of curves -----------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """The end of a curve, in the units of its axes, and the name to be written there."""

    name: str
    colour: str
    x: float
    y: float
    said: str = ""  # written after the name, which may be shortened


@dataclass(frozen=True)
class _Box:
    """A rectangle, in inches from the lower left corner of the figure."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2

    def overlaps(self, other: "_Box", gap: float = 0.02) -> bool:
        return (
            self.x < other.x + other.width + gap
            and other.x < self.x + self.width + gap
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )

    def within(self, other: "_Box") -> bool:
        return (
            self.x >= other.x
            and self.y >= other.y
            and self.x + self.width <= other.x + other.width
            and self.y + self.height <= other.y + other.height
        )

    def count(self, points: np.ndarray) -> int:
        """How many of the points lie in it."""
        x, y = points[:, 0] - self.x, points[:, 1] - self.y
        return int(np.count_nonzero((x >= 0) & (x <= self.width) & (y >= 0) & (y <= self.height)))


def name_curves(axes: Axes, ends: Sequence[End]) -> Figure:
    """Write the names of curves at their ends. To be called last: what changes the axes later would move them away.

    Curves that end at the right edge get their names beside the axes, spread vertically. Others get theirs in the axes,
    where it hides no other curve if there is such a place; if there is no room at all, beside the axes too.
    """
    figure = _figure(axes)
    inches = figure.dpi_scale_trans
    texts = [
        figure.text(0, 0, name, color=end.colour, fontsize=9.5, va="center", linespacing=1.0, transform=inches)
        for end, name in zip(ends, _wrapped(ends), strict=True)
    ]
    for number, text in enumerate(texts):
        text.set_in_layout(False)
        text.set_gid(f"name-{number}")
    boxes = _place(axes, ends, [_size(figure, text) for text in texts])
    for number, (text, box, anchor) in enumerate(zip(texts, boxes, _anchors(axes, ends), strict=True)):
        text.set_position((box.x, box.middle))
        text.set_path_effects([patheffects.withStroke(linewidth=2.5, foreground=plots.PAPER)])
        points = _leader(anchor, box)
        if len(points):
            leader = Line2D(*points.T, color=text.get_color(), linewidth=0.7, alpha=0.75)
            leader.set(transform=inches, in_layout=False, gid=f"leader-{number}")
            figure.add_artist(leader)
    return figure


def _place(axes: Axes, ends: Sequence[End], sizes: Sequence[tuple[float, float]]) -> list[_Box]:
    """Where the names go. Lays the figure out, and makes it higher if the names beside the axes need it."""
    at_edge = [axes.transAxes.inverted().transform(axes.transData.transform((e.x, e.y)))[0] > 0.9 for e in ends]
    beside = [i for i, edge in enumerate(at_edge) if edge]
    while True:
        box = _lay_out(axes, max((sizes[i][0] for i in beside), default=0.0))
        missing = sum(sizes[i][1] for i in beside) - box.height
        if missing > 0:
            _figure(axes).set_figheight(_figure(axes).get_figheight() + missing + 0.05)
            continue
        anchors = _anchors(axes, ends)
        column = _column(beside, anchors, sizes, box)
        room = _Box(box.x, box.y, _figure(axes).get_figwidth() - box.x - 0.03, box.height)
        rest = [i for i in range(len(ends)) if i not in column]
        rightmost = sorted(rest, key=lambda i: anchors[i], reverse=True)
        orders = [rightmost, rightmost[::-1], sorted(rightmost, key=lambda i: ends[i].said)]
        tried = [_beside_ends(order, column, anchors, sizes, room, _samples(axes)) for order in orders]
        cost, placed = min(tried, key=lambda found: found[0])
        if math.isfinite(cost):
            return [placed[i] for i in range(len(ends))]
        beside.append(next(i for i in rest if i not in placed))


def _beside_ends(
    order: Sequence[int],
    column: Mapping[int, _Box],
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    room: _Box,
    curves: np.ndarray,
) -> tuple[float, dict[int, _Box]]:
    """Names in the axes, placed one after the other; and how bad the result is, infinite if one has no place."""
    placed, lines, total = dict(column), curves, 0.0
    for i in order:
        cost, box = _in_axes(anchors[i], sizes[i], room, list(placed.values()), lines)
        if box is None:
            return math.inf, placed
        placed[i], total = box, total + cost
        lines = np.concatenate([lines, _leader(anchors[i], box)])
    return total, placed


def _lay_out(axes: Axes, margin: float) -> _Box:
    """Leave a margin for names on the right, once and for all; returns where the axes are."""
    figure = _figure(axes)
    width, height = figure.get_size_inches()
    figure.set_layout_engine("constrained", rect=(0, 0, 1 - (margin + 2 * _GAP if margin else 0) / width, 1))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    place = axes.get_position()
    return _Box(place.x0 * width, place.y0 * height, place.width * width, place.height * height)


def _column(
    beside: Sequence[int], anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], axes: _Box
) -> dict[int, _Box]:
    """Names beside the axes, in the order of their curves' ends."""
    order = sorted(beside, key=lambda i: anchors[i][1])
    heights = [sizes[i][1] for i in order]
    middles = spread([anchors[i][1] for i in order], heights, axes.y, axes.y + axes.height)
    x = axes.x + axes.width + 1.5 * _GAP
    return {i: _Box(x, m - h / 2, sizes[i][0], h) for i, m, h in zip(order, middles, heights, strict=True)}


def spread(wanted: Sequence[float], heights: Sequence[float], low: float, high: float) -> list[float]:
    """The middles nearest to those wanted, in ascending order, at which boxes fit between low and high without overlap.

    Least squares: without the boxes' heights this is an isotonic regression, and bounds are met by clipping it.

    >>> spread([0.0, 5.0, 5.0, 5.0], [1, 1, 1, 1], 0, 10)
    [0.5, 4.0, 5.0, 6.0]
    """
    if not wanted:
        return []
    below = [sum(heights[:i]) + heights[i] / 2 for i in range(len(heights))]  # of each middle, if all were stacked
    blocks: list[tuple[float, int]] = []  # mean, how many
    for value in (w - b for w, b in zip(wanted, below, strict=True)):
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, several = blocks.pop()
            mean, count = (before * several + mean * count) / (several + count), several + count
        blocks.append((mean, count))
    shifts = [min(max(mean, low), high - sum(heights)) for mean, count in blocks for _ in range(count)]
    return [shift + b for shift, b in zip(shifts, below, strict=True)]


def _in_axes(
    anchor: tuple[float, float], size: tuple[float, float], room: _Box, taken: Sequence[_Box], lines: np.ndarray
) -> tuple[float, _Box | None]:
    """The cost and place of a name near the end of its curve: best is to hide no other line, and to be close."""
    (x, y), (width, height) = anchor, size
    best: tuple[float, _Box | None] = (math.inf, None)
    for half_rows in range(13):
        for side in (1, -1) if half_rows else (1,):
            bottom = y - height / 2 + side * half_rows * height / 2
            for extra, left in ((0, x + _GAP), (1.5, x - width / 2), (2, x - width), (3, x - _GAP - width)):
                box = _Box(left, bottom, width, height)
                if not box.within(room) or any(box.overlaps(other) for other in taken):
                    continue
                cost = 2 * half_rows + extra + box.count(lines)
                cost += 3 * sum(other.count(_leader(anchor, box)) for other in taken)
                if cost < best[0]:
                    best = (cost, box)
    return best


def _leader(anchor: tuple[float, float], box: _Box) -> np.ndarray:
    """Points on the line from the end of a curve to its name; none if the name is close enough."""
    x, y = min(max(anchor[0], box.x), box.x + box.width), min(max(anchor[1], box.y), box.y + box.height)
    if math.dist(anchor, (x, y)) <= _FAR:
        return np.empty((0, 2))
    return np.linspace(anchor, (x, box.middle if x == box.x else y), 20)


def _samples(axes: Axes) -> np.ndarray:
    """Points on all curves, close to each other, in inches."""
    found = [np.empty((0, 2))]
    for line in axes.lines:
        points = line.get_transform().transform(line.get_xydata()) / _figure(axes).dpi
        points = points[np.isfinite(points).all(axis=1)]
        if len(points):
            along = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(points, axis=0).T))])
            at = np.linspace(0, along[-1], 2 + int(along[-1] / 0.03))
            found.append(np.stack([np.interp(at, along, points[:, k]) for k in (0, 1)], axis=1))
    return np.concatenate(found)


def _anchors(axes: Axes, ends: Sequence[End]) -> list[tuple[float, float]]:
    """Where curves end, in inches."""
    dpi = _figure(axes).dpi
    return [(x / dpi, y / dpi) for x, y in (axes.transData.transform((end.x, end.y)) for end in ends)]


def _figure(axes: Axes) -> Figure:
    assert isinstance(axes.figure, Figure)
    return axes.figure


def _size(figure: Figure, text: Text) -> tuple[float, float]:
    box = text.get_window_extent()
    return box.width / figure.dpi + 0.02, box.height / figure.dpi + 0.015


def _wrapped(ends: Sequence[End]) -> list[str]:
    """Names in one line or two, with what is said after them."""
    shown = []
    for end, name in zip(ends, short_names([end.name for end in ends], 2 * _LINE_OF_TEXT - 2), strict=True):
        lines = [name]
        if len(name) > _LINE_OF_TEXT:
            middle = len(name) // 2
            cut = min((i for i, c in enumerate(name) if c in "… (,="), key=lambda i: abs(i - middle), default=middle)
            cut = cut + 1 if max(cut + 1, len(name) - cut - 1) <= _LINE_OF_TEXT + 2 else middle
            lines = [name[:cut].rstrip(), name[cut:].lstrip()]
        if end.said and len(lines[-1] + end.said) > _LINE_OF_TEXT + 4:
            lines.append(end.said.lstrip(", "))
        else:
            lines[-1] += end.said
        shown.append("\n".join(lines))
    return shown


def short_names(names: Sequence[str], most: int) -> list[str]:
    """Names of at most so many characters, different if the names are.

    >>> short_names(["topk", "EF(AllGather(TopK(0.01, values=BF16())))", "EF(AllGather(TopK(0.1, values=BF16())))"], 20)
    ['topk', '…er(TopK(0.01, valu…', '…er(TopK(0.1, value…']
    """
    shown = [plots.short(name, most) for name in names]
    for clash in {text for text in shown if shown.count(text) > 1}:
        places = [i for i, text in enumerate(shown) if text == clash]
        letters = zip(*(names[i] for i in places), strict=False)
        common = sum(1 for _ in takewhile(lambda same: len(set(same)) == 1, letters))
        start = max(0, common - most // 2)
        for i in places:
            rest = names[i][start:]
            shown[i] = f"…{rest}" if len(rest) < most else f"…{rest[: most - 2]}…"
    return [text if shown.count(text) == 1 else f"{text[: most - 4]}… {i + 1}" for i, text in enumerate(shown)]
