"""Figures: every curve has its name at its end, names never overlap, and axes are linear where that is possible."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from lab.test_results import NETWORK, simulated, write
from tersegrad.lab import curves, plots
from tersegrad.lab.curves import End
from tersegrad.lab.results import Comparison, compare, read_folder


def names(figure: Figure) -> dict[str, object]:
    """The boxes of all names, in pixels, by what is written."""
    found = [text for text in figure.texts if (text.get_gid() or "").startswith("name-")]
    return {text.get_text().replace("\n", ""): text.get_window_extent() for text in found}


def leaders(figure: Figure) -> list[float]:
    """By how many inches each of the lines to names goes up or down."""
    found = [line for line in figure.artists if (line.get_gid() or "").startswith("leader-")]
    return [float(np.ptp(line.get_ydata())) for line in found]


def compared(folder, *runs) -> Comparison:
    for number, lines in enumerate(runs):
        write(folder, f"{number}", lines)
    (comparison,) = compare(read_folder(folder).runs)
    return comparison


# ---- names ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(-5, 15), st.floats(0.1, 2)), max_size=10))
def test_boxes_are_spread(boxes):
    boxes = sorted(boxes)
    heights = [height for _, height in boxes]
    top = max(10.0, sum(heights))
    middles = curves.spread([wanted for wanted, _ in boxes], heights, 0, top)
    edges = [(middle - height / 2, middle + height / 2) for middle, height in zip(middles, heights, strict=True)]
    assert all(low >= -1e-9 and high <= top + 1e-9 for low, high in edges)
    assert all(below[1] <= above[0] + 1e-9 for below, above in itertools.pairwise(edges))


def test_boxes_that_fit_stay_where_they_are():
    assert curves.spread([1, 3, 8], [1, 1, 1], 0, 10) == [1, 3, 8]


@pytest.mark.parametrize("seed", range(12))
def test_names_never_overlap_and_stay_in_the_figure(seed):
    draw = random.Random(seed)
    count = draw.choice([1, 2, 5, 9, 14, 22])
    with plots.style():
        axes = plots.new_figure(2.9).subplots()
        ends = []
        for i in range(count):
            x = draw.choice([1.0, 1.0, draw.random()])
            y = draw.choice([0.9, 0.9 + 0.01 * draw.random(), draw.random()])
            axes.plot(np.linspace(0, x, 9), y * np.linspace(0, 1, 9) ** 0.3)
            name = draw.choice([f"spec{i}", f"ErrorFeedback(AllGather(TopK(ratio=0.{i:03}, values=BF16())))"])
            ends.append(End(name, plots.SERIES[i % 8], x, y, draw.choice(["", "", ", diverged"])))
        figure = curves.name_curves(axes, ends)
    boxes = names(figure)
    assert len(boxes) == count, "names that differ are shown differently"
    for a, b in itertools.combinations(boxes.values(), 2):
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0) > 0 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0
        assert not overlap
    for box in boxes.values():
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


def test_a_name_that_was_moved_has_a_line_to_its_curve():
    def drawn(*heights: float) -> tuple[Figure, dict]:
        with plots.style():
            axes = plots.new_figure(2.9).subplots()
            for y in heights:
                axes.plot([0, 1], [0, y])
            ends = [End(f"s{i}", plots.INK, 1, y) for i, y in enumerate(heights)]
            figure = curves.name_curves(axes, ends)
        return figure, names(figure)

    apart, boxes = drawn(0.2, 0.5, 0.9)
    assert boxes["s0"].y0 < boxes["s1"].y0 < boxes["s2"].y0
    close, boxes = drawn(0.9, 0.8999, 0.9001)
    assert boxes["s1"].y0 < boxes["s0"].y0 < boxes["s2"].y0, "in the order of the curves"
    assert len([rise for rise in leaders(close) if rise > 0.1]) == 2
    assert max(leaders(apart), default=0) < 0.02


def test_an_early_end_has_its_name_there():
    with plots.style():
        axes = plots.new_figure(2.9).subplots()
        axes.plot([0, 1], [0, 0.1])
        axes.plot([0, 0.3], [0, 1])
        figure = curves.name_curves(axes, [End("long", plots.INK, 1, 0.1), End("short", plots.INK, 0.3, 1)])
    x, y = axes.transData.transform((0.3, 1))
    box = names(figure)["short"]
    assert math.dist((x, y), (box.x0, (box.y0 + box.y1) / 2)) < 0.3 * figure.dpi


def test_names_that_are_shortened_stay_different():
    long = [f"ErrorFeedback(AllGather(TopK(ratio={r}, values=RangeFloat(bits=8))))" for r in (0.1, 0.01, 0.001)]
    shown = curves.short_names([*long, "topk"], 30)
    assert len(set(shown)) == 4
    assert max(map(len, shown)) <= 30
    assert len(set(curves.short_names(["a" * 50, "a" * 51, "a" * 52], 20))) == 3


# ---- curves --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "scale"), [(5, "linear"), (50, "log")])
def test_axes_are_linear_where_the_ranges_allow(tmp_path, factor, scale):
    plain = simulated("none", sent=1000 * factor, ms=10 * factor, **NETWORK)
    comparison = compared(tmp_path, plain, simulated("topk", sent=1000, ms=10, **NETWORK))
    for figure in (curves.score_by_bytes(comparison), curves.score_by_time(comparison)):
        (axes,) = figure.axes
        assert axes.get_xscale() == scale
        assert ("(log)" in axes.get_xlabel()) == (scale == "log")
        assert set(names(figure)) == {"none", "topk"}
    assert curves.score_by_step(comparison).axes[0].get_xscale() == "linear"


def test_a_run_that_diverges_does_not_flatten_the_others(tmp_path):
    about = {"metric": "perplexity", "higher_is_better": False}
    lines = simulated("dgc", scores=(900, 1e30, None, None), **about)
    lines = [line | ({"loss": 1e12} if line.get("loss") and line["step"] > 10 else {}) for line in lines]
    comparison = compared(tmp_path, simulated("none", scores=(900, 600, 500, 400), **about), lines)
    figure = curves.score_by_step(comparison)
    assert figure.axes[0].get_ylim()[1] < 1200
    assert set(names(figure)) == {"none", "dgc, diverged"}
    assert curves.loss_by_step(comparison).axes[0].get_ylim()[1] < 1


def test_an_unfinished_run_that_is_better_is_drawn_to_its_end(tmp_path):
    ahead = simulated("topk", scores=(0.6, 0.95, 0.97, 0.98))[:10]
    comparison = compared(tmp_path, simulated("none", scores=(0.1, 0.2, 0.3, 0.4)), ahead)
    lines = curves.score_by_step(comparison).axes[0].lines
    assert max(max(line.get_ydata(), default=0) for line in lines) == 0.97


def test_a_figure_of_diverged_runs_alone(tmp_path):
    about = {"metric": "perplexity", "higher_is_better": False}
    comparison = compared(tmp_path, simulated("dgc", scores=(900, 600, 1e30, None), **about))
    figure = curves.score_by_step(comparison)
    assert figure.axes[0].get_ylim()[1] < 1200
    assert set(names(figure)) == {"dgc, diverged"}


def test_diverged_and_unfinished_runs_are_not_in_the_median(tmp_path):
    runs = [simulated("topk", seed, scores=(0.5, 0.6, 0.7, 0.8 + seed / 100)) for seed in range(2)]
    lost = simulated("topk", 2, scores=(0.1, 0.2, None, None))
    comparison = compared(tmp_path, *runs, lost, simulated("topk", 3, scores=(0.1, 0.1, 0.1, 0.1))[:8])
    figure = curves.score_by_step(comparison)
    (median,) = [line for line in figure.axes[0].lines if line.get_linewidth() > 1.5]
    assert list(median.get_ydata()) == pytest.approx([0.5, 0.6, 0.7, 0.805])
    assert list(names(figure)) == ["topk"]
    assert sum(line.get_marker() == "x" for line in figure.axes[0].lines) == 1


@pytest.mark.parametrize(("factor", "scale"), [(2, "linear"), (100, "log")])
def test_a_loss_far_above_the_others_makes_the_axis_logarithmic(tmp_path, factor, scale):
    high = [line | ({"loss": factor * line["loss"]} if "loss" in line else {}) for line in simulated("signsgd")]
    (axes,) = curves.loss_by_step(compared(tmp_path, simulated("none"), high)).axes
    assert axes.get_yscale() == scale


def test_times_that_are_not_known_give_no_figure(tmp_path):
    comparison = compared(tmp_path, simulated("none"), simulated("topk"))
    assert curves.score_by_time(comparison) is None
    assert curves.score_by_bytes(comparison) is not None


def test_the_planners_figure_has_names_too(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(plots, "save", lambda figure, path: kept.append(figure) or path)
    steps = {"none": [0.1, 0.2, 0.4], "topk": [0.05, 0.06, 0.4]}
    assert curves.draw([4, 8, 16], steps, 0.05, "at 100 Mbit/s", tmp_path / "x.png") == tmp_path / "x.png"
    assert set(names(kept[0])) == {"none", "topk", "no communication"}


# ---- colours -------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("colour", [*plots.SERIES, plots.PLAIN, plots.MUTED, plots.INK])
def test_names_can_be_read_in_light_and_dark(colour):
    for ink, paper in ((colour, plots.PAPER), (plots.THEME[colour], plots.THEME[plots.PAPER])):
        bright, dark = sorted([luminance(ink), luminance(paper)], reverse=True)
        assert (bright + 0.05) / (dark + 0.05) > 3
