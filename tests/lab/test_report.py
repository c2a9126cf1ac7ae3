"""The report shows the numbers of the files: in its HTML, and in a real browser on a phone and on a desk."""

import base64
import itertools
import json
import math
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from lab.test_results import NETWORK, simulated, write
from tersegrad.cli import main
from tersegrad.lab import curves, plots
from tersegrad.lab import network as networks
from tersegrad.lab.report import NETWORK_OPTIONS, write_report
from tersegrad.lab.results import Cell, compare, read_folder, read_run

STEPS = 40
EVALS = (10, 20, 30, 40)
HOSTILE = """<script>alert("x")</script>'&amp;$\\frac{1}$"""
CELLS = [
    {"spec": "none", "bandwidth": "1Gbit", "ms": 50.0, "ratio": 1.0},
    {"spec": "none", "bandwidth": "10Mbit", "ms": 900.0, "ratio": 1.0},
    {"spec": "topk", "bandwidth": "10Mbit", "ms": 90.0, "ratio": 0.1},
    {"spec": "topk", "bandwidth": "1Gbit", "ms": 150.0, "ratio": 3.0},
]


def events(
    spec: str, seed: int = 0, *, ms: float = 100, sent: int = 1000, scores=(0.5, 0.7, 0.8, 0.9), hook=True, **about
):
    """The lines of a finished run: steps of equal length, ``sent`` bytes each."""
    start = {
        "event": "start", "spec": spec, "expression": f"Expression({spec})", "workload": "fashion",
        "metric": "accuracy", "workers": 4, "bandwidth": "100Mbit", "latency": None, "network": "netns", "seed": seed,
        "parameters": 422000, "batch": 32, "steps": STEPS, "compute_ms": 12.5, "command": "tersegrad train & wait",
        "environment": {"torch": "2.13.0", "cores": 2, "nested": {"a": 1}}, "time": f"2026-11-15T20:00:{seed:02}",
    }  # fmt: skip
    lines = [start | about]
    for step in range(5, STEPS + 1, 5):
        at = {"step": step, "seconds": step * ms / 1000, "sent": step * sent}
        parts = {"encode": 0.002 * step, "wait": 0.03 * step, "decode": 0.001 * step, "density": 0.01}
        parts = parts if hook else dict.fromkeys(parts)
        lines.append({"event": "step", "loss": 2 / step, **at, **parts})
        if step in EVALS and scores:
            lines.append({"event": "eval", "epoch": step // 10, "score": scores[EVALS.index(step)], **at})
    return [*lines, {"event": "end", "score": scores[-1] if scores else None, **at}]


class Page(HTMLParser):
    """What carries data, what is shown, and what is loaded."""

    def __init__(self, html: str):
        super().__init__()
        self.values: dict[tuple[str, str], dict[str, str]] = {}
        self.sources: list[str] = []
        self.alts: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self._open: dict[str, str] | None = None
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.add(tag)
        self.sources += [given[name] for name in ("src", "href", "srcset", "data", "action") if name in given]
        self.alts += [given.get("alt", "")] if tag == "img" else []
        if "data-key" in given:
            key = given.get("data-file", given.get("data-bandwidth"))
            key = (given.get("data-spec", ""), given["data-key"]) + (() if key is None else (key,))
            self._open = self.values.setdefault(key, given | {"shown": ""})

    def handle_endtag(self, tag):
        self._open = None if tag in ("td", "b") else self._open

    def handle_data(self, data):
        self.text += data
        if self._open is not None:
            self._open["shown"] += data

    def value(self, *key: str) -> float:
        return float(self.values[key]["data-value"])

    def shown(self, *key: str) -> str:
        return self.values[key]["shown"]


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not drawn, which takes most of a report's time; for tests of numbers and words."""
    monkeypatch.setattr(curves, "name_curves", lambda axes, ends: axes.figure)
    monkeypatch.setattr(plots, "save", lambda figure, path: path.touch())
    monkeypatch.setattr(plots, "svg", lambda figure: "<svg/>")


quick = pytest.mark.usefixtures("undrawn")


def report(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


# ---- numbers -------------------------------------------------------------------------------------


@quick
def test_numbers_are_those_of_the_files(tmp_path):
    write(tmp_path, "a", events("none", ms=200, sent=50_000, scores=(0.5, 0.7, 0.8, 0.92), hook=False))
    write(tmp_path, "b", events("topk", ms=40, sent=1_000, scores=(0.4, 0.6, 0.8, 0.9)))
    page = report(tmp_path)
    assert page.value("none", "score") == 0.92
    assert page.shown("none", "score") == "92.00 %"
    assert page.value("topk", "ms_per_step") == pytest.approx(40)
    assert page.value("topk", "mb_per_step") == pytest.approx(0.001)
    assert page.value("topk", "speedup") == pytest.approx(5)
    assert page.shown("topk", "speedup") == "5.00×"  # noqa: RUF001
    assert page.value("topk", "fewer_bytes") == pytest.approx(50)
    assert page.value("", "target") == 0.9, "the lowest final score"
    seconds = np.interp(0.9, [0.5, 0.7, 0.8, 0.92], [2, 4, 6, 8])
    assert page.value("none", "seconds_to_target") == pytest.approx(seconds)
    assert page.value("none", "mb_to_target") == pytest.approx(seconds / 0.2 * 0.05)
    assert page.value("topk", "seconds_to_target") == pytest.approx(1.6)
    assert page.value("topk", "target_speedup") == pytest.approx(seconds / 1.6)


@quick
def test_several_seeds_give_median_and_range(tmp_path):
    finals, times = [0.90, 0.94, 0.91], [100, 130, 110]
    for seed, (final, ms) in enumerate(zip(finals, times, strict=True)):
        write(tmp_path, f"run{seed}", events("topk", seed, ms=ms, scores=(0.5, 0.7, 0.8, final)))
    page = report(tmp_path)
    score = page.values["topk", "score"]
    assert [float(score[f"data-{k}"]) for k in ("value", "min", "max")] == [0.91, 0.90, 0.94]
    assert score["shown"] == "91.00 %[90.00 %, 94.00 %]"
    reached = [
        np.interp(0.9, [0.5, 0.7, 0.8, f], np.array(EVALS) * ms / 1000) for f, ms in zip(finals, times, strict=True)
    ]
    seconds = page.values["topk", "seconds_to_target"]
    assert float(seconds["data-value"]) == pytest.approx(np.median(reached))
    assert float(seconds["data-max"]) == pytest.approx(max(reached))
    assert "3 seeds" in page.text


@quick
def test_step_time_is_split(tmp_path):
    write(tmp_path, "a", events("none", ms=200, hook=False))
    write(tmp_path, "b", events("topk", ms=40))
    page = report(tmp_path)
    expected = {"measured": 40, "compute": 12.5, "encode": 2, "wait": 30, "decode": 1}
    assert {part: page.value("topk", f"{part}_ms") for part in expected} == pytest.approx(expected)
    assert page.value("none", "compute_ms") == 12.5
    assert page.shown("none", "wait_ms") == "–"  # noqa: RUF001
    assert read_run(tmp_path / "a.jsonl").parts["not split"] == pytest.approx(0.1875)
    assert "overlap" in page.text


@quick
def test_the_first_moment_at_the_target_counts(tmp_path):
    write(tmp_path, "up-and-down", events("a", ms=1000, scores=(0.5, 0.9, 0.7, 0.8)))
    write(tmp_path, "early", events("b", ms=1000, scores=(0.85, 0.86, 0.87, 0.88)))
    page = report(tmp_path)
    assert page.value("a", "seconds_to_target") == pytest.approx(17.5), "0.8 lies between 0.5 and 0.9"
    assert page.value("b", "seconds_to_target") == pytest.approx(10)
    assert page.shown("b", "seconds_to_target") == "≤ 10.0", "nobody looked before"
    assert page.shown("b", "lead_seconds") == "≤ 10.0 s"


@quick
def test_perplexity_is_better_when_lower(tmp_path):
    write(tmp_path, "a", events("none", ms=100, scores=(400, 200, 150, 120), metric="perplexity"))
    write(tmp_path, "b", events("topk", ms=20, scores=(500, 300, 200, 130), metric="perplexity"))
    page = report(tmp_path)
    assert page.value("", "target") == 130
    assert "highest final score" in page.text
    seconds = np.interp(-130, [-400, -200, -150, -120], [1, 2, 3, 4])
    assert page.value("none", "seconds_to_target") == pytest.approx(seconds)
    assert page.shown("topk", "score") == "130.00"


@quick
def test_settings_are_not_mixed(tmp_path):
    write(tmp_path, "a", events("none", ms=200, bandwidth="10Mbit"))
    write(tmp_path, "b", events("topk", ms=100, bandwidth="1Gbit"))
    page = report(tmp_path)
    assert "fashion on 4 workers, 10Mbit" in page.text
    assert "fashion on 4 workers, 1Gbit" in page.text
    assert "data-value" not in page.values["topk", "speedup"], "another link is no baseline"
    assert {path.name for path in tmp_path.glob("*loss.png")} == {"1-loss.png", "2-loss.png"}


@quick
def test_learning_rates_are_not_mixed(tmp_path):
    write(tmp_path, "a", events("none", ms=200))
    write(tmp_path, "b", events("topk", ms=100, learning_rate=0.05))
    page = report(tmp_path)
    assert "fashion on 4 workers, 100Mbit, learning rate 0.05" in page.text
    assert "data-value" not in page.values["topk", "speedup"], "another learning rate is no baseline"


@quick
def test_a_preset_that_changed_is_two_methods(tmp_path):
    write(tmp_path, "a", events("topk", expression="TopK(ratio=0.01)"))
    write(tmp_path, "b", events("topk", ms=50, expression="TopK(ratio=0.1)"))
    page = report(tmp_path)
    assert page.value("topk = TopK(ratio=0.1)", "ms_per_step") == pytest.approx(50)


# ---- runs that are not as they should be ---------------------------------------------------------


@quick
@pytest.mark.parametrize("tail", ["", '{"event": "st', '{"event":"step","step":25,"seconds":2.5,"lo', "\xff"])
def test_unfinished_runs_are_shown_and_left_out(tmp_path, tail):
    write(tmp_path, "a", events("none"))
    write(tmp_path, "b", events("topk", scores=(0.1, 0.2, 0.3, 0.4))[:7], tail)
    page = report(tmp_path)
    run = read_run(tmp_path / "b.jsonl")
    assert not run.finished
    assert run.last_step == 20
    assert page.value("", "target") == 0.9, "only finished runs set it"
    assert "data-value" not in page.values["topk", "score"]
    assert page.value("topk", "run_steps", "b.jsonl") == 20
    assert page.value("topk", "run_score", "b.jsonl") == 0.2
    assert "seed 0 unfinished: step 20 of 40" in page.text


def test_a_last_line_without_its_line_break_counts_if_it_is_whole(tmp_path):
    *lines, end = events("topk")
    write(tmp_path, "a", lines, json.dumps(end))
    assert read_run(tmp_path / "a.jsonl").finished


@quick
def test_without_a_finished_baseline_there_are_no_ratios(tmp_path):
    write(tmp_path, "b", events("topk"))
    page = report(tmp_path)
    assert page.shown("topk", "speedup") == page.shown("topk", "fewer_bytes") == "–"  # noqa: RUF001
    assert "there is no run of none" in page.text
    write(tmp_path, "a", events("none")[:4])
    page = report(tmp_path)
    assert page.shown("topk", "speedup") == "–"  # noqa: RUF001
    assert "the run of none is not finished" in page.text


@quick
def test_files_cut_off_at_once_are_named(tmp_path):
    write(tmp_path, "a", events("none"))
    write(tmp_path, "b", [], '{"event": "start", "sp')
    assert read_folder(tmp_path).stubs == ("b.jsonl",)
    assert "b.jsonl" in report(tmp_path).text


def test_runs_without_evaluation_or_bytes(tmp_path):
    lines = [line | ({} if line["event"] == "start" else {"sent": None}) for line in events("torch:bf16", scores=())]
    write(tmp_path, "a", lines)
    page = report(tmp_path)
    assert page.value("torch:bf16", "ms_per_step") == pytest.approx(100)
    for key in ("score", "mb_per_step", "seconds_to_target"):
        assert "data-value" not in page.values["torch:bf16", key]
    assert "No finished run has a score" in page.text
    assert not (tmp_path / "score-time.png").exists()


def test_runs_that_diverged(tmp_path):
    write(tmp_path, "a", events("none", scores=(300, 200, 150, 100), metric="perplexity"))
    lines = events("topk", scores=(300, math.inf, math.nan, math.nan), metric="perplexity")
    write(tmp_path, "b", [line | ({"loss": math.inf} if line["event"] == "step" else {}) for line in lines])
    page = report(tmp_path)
    assert page.value("", "target") == 100
    assert "data-value" not in page.values["topk", "seconds_to_target"]
    assert page.shown("topk", "score") == "diverged"
    assert "seed 0 diverged at step 5" in page.text


@quick
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "has no runs to report: no .jsonl file"),
        ("a.jsonl", "", "no complete first line"),
        ("a.jsonl", '{"event": "epoch"}\n', r"a\.jsonl, line 1, is 'epoch', but a run begins with 'start'"),
        ("a.jsonl", '{"event": "start"}\n', r"a\.jsonl, line 1, has no environment"),
        ("a.jsonl", "[1]\n", r"a\.jsonl, line 1, is not a JSON object"),
        ("map.json", "{", r"map\.json is not JSON"),
        ("map.json", '{"cells": []}', r"map\.json needs 'cells'"),
        ("map.json", '{"cells": [3]}', r"map\.json, cell 1, has ratio"),
    ],
)
def test_errors_name_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)


@quick
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops\n", "line 3, is not JSON"),
        ('{"event": "step", "step": 5, "seconds": "1"}\n', "line 3, has seconds = '1', which is not a number"),
        ('{"event": "step", "step": 0}\n', "line 3, has step = 0, which is not a whole number of at least 1"),
        ('{"event": "pause"}\n', "line 3, is 'pause'; known here are"),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
    write(tmp_path, "a", events("none")[:1], "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path / 'a.jsonl'))}, {message}"):
        write_report(tmp_path)


@quick
def test_lines_after_the_end_and_missing_folders(tmp_path):
    write(tmp_path, "a", [*events("none"), *events("none")])
    with pytest.raises(ValueError, match="comes after 'end'"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        write_report(tmp_path / "nothing")


# ---- simulated runs ------------------------------------------------------------------------------


@quick
def test_simulated_numbers_are_those_of_the_files(tmp_path):
    for seed, (plain, own) in enumerate([(0.90, 0.86), (0.92, 0.91), (0.91, 0.88)]):
        scores = (0.5, 0.6, 0.7, plain)
        write(tmp_path, f"n{seed}", simulated("none", seed, scores=scores, sent=47_000, ms=900, waiting=None))
        scores = (0.5, 0.45 - seed / 100, 0.7, own)
        write(tmp_path, f"t{seed}", simulated("topk4", seed, scores=scores, ms=300 + seed, waiting=0.7 + seed / 10))
    page = report(tmp_path)
    score = page.values["topk4", "score"]
    assert [float(score[f"data-{k}"]) for k in ("value", "min", "max")] == [0.88, 0.86, 0.91]
    assert score["shown"] == "88.00 %[86.00 %, 91.00 %]"
    assert page.value("topk4", "fewer_bytes") == pytest.approx(47)
    assert page.value("topk4", "predicted_ms_per_step") == pytest.approx(301)
    assert page.value("topk4", "worst_drop") == pytest.approx(0.06)
    assert page.shown("topk4", "worst_drop") == "6.00[5.00, 7.00]"
    assert page.shown("none", "worst_drop") == "0.00"
    assert page.value("topk4", "waiting") == pytest.approx(0.8)
    assert page.shown("topk4", "waiting") == "80 %[70 %, 90 %]"
    assert page.shown("none", "waiting") == "–"  # noqa: RUF001
    assert page.value("", "target") == 0.86
    reached = np.interp(0.86, [0.7, 0.91], [30 * 0.9, 40 * 0.9])
    assert page.value("none", "predicted_seconds_to_target") == pytest.approx(reached)
    assert "topk4 ends 3.00 points below none (spread over seeds 5.00 points) with 47.0× fewer bytes." in page.text  # noqa: RUF001
    assert page.value("topk4", "lead_gap") == pytest.approx(-0.03)
    assert page.value("topk4", "lead_spread") == pytest.approx(0.05)


@quick
def test_predicted_times_are_called_so(tmp_path):
    write(tmp_path, "a", simulated("none", ms=900, sent=9000, **NETWORK))
    write(tmp_path, "b", simulated("topk", ms=300, **NETWORK))
    html = write_report(tmp_path).read_text()
    page = Page(html)
    assert "PREDICTED by the planner's model for 100Mbit, 20ms one way, 250 ms of computation" in page.text
    assert "not measured" in page.text
    assert not [key for key in page.values if "seconds" in key[1] and "predicted" not in key[1]]
    assert not re.findall(
        r"<th[^>]*>[^<]*(?:ms|\bs\b|min)[^<]*", re.sub(r"predicted[^<]*|s&nbsp;to&nbsp;simulate", "", html)
    )
    assert "Where a step's time goes" not in page.text
    (time,) = [alt for alt in page.alts if "training time" in alt]
    assert "against predicted training time" in time
    assert "after predicted 36.0 seconds" in time
    assert NETWORK_OPTIONS not in page.text


def test_the_axis_says_predicted(tmp_path):
    write(tmp_path, "a", simulated("none", ms=900))
    write(tmp_path, "b", simulated("topk", ms=300, network="none", batch=8, compute_ms=1.0))
    said = {
        c.setting.network: curves.score_by_time(c).axes[0].get_xlabel() for c in compare(read_folder(tmp_path).runs)
    }
    assert said == {"simulated": "predicted training time, seconds", "none": "training time, seconds"}


@quick
def test_without_a_network_there_are_no_times(tmp_path):
    write(tmp_path, "a", simulated("none", sent=9000))
    write(tmp_path, "b", simulated("topk"))
    page = report(tmp_path)
    assert page.text.count(NETWORK_OPTIONS) == 1
    assert not [key for key in page.values if "predicted" in key[1] or "seconds" in key[1]]
    assert not (tmp_path / "score-time.png").exists()
    assert {path.stem for path in tmp_path.glob("*.png")} == {"score-steps", "score-bytes", "loss", "density"}
    assert page.value("topk", "fewer_bytes") == 9
    assert page.value("topk", "run_wall", "b.jsonl") == pytest.approx(0.4)


@quick
def test_lower_is_better_and_any_metric(tmp_path):
    about = {"metric": HOSTILE, "higher_is_better": False}
    write(tmp_path, "a", simulated("none", scores=(0.5, 0.3, 0.2, 0.1231), **about))
    write(tmp_path, "b", simulated("topk", scores=(0.6, 0.2, 0.45, 0.1342), **about))
    page = report(tmp_path)
    assert page.shown("none", "score") == "0.1231"
    assert page.value("topk", "worst_drop") == pytest.approx(0.25)
    assert f"topk ends 0.0111 above none in {HOSTILE}, where lower is better (one seed each)" in page.text
    assert "rose above the best score" in page.text
    assert "script" not in page.tags


@quick
def test_a_spec_that_learns_nothing_does_not_set_the_target(tmp_path):
    write(tmp_path, "a", simulated("none", ms=100))
    write(tmp_path, "b", simulated("signsgd", ms=10, scores=(0.1, 0.1, 0.1, 0.1)))
    page = report(tmp_path)
    assert page.value("", "target") == 0.9
    assert page.shown("signsgd", "predicted_seconds_to_target") == "–reached by 0 of 1"  # noqa: RUF001
    assert "Not counted are runs that ended worse than 70.00 %" in page.text


@quick
def test_diverged_runs_are_said_in_words(tmp_path):
    for seed in range(2):
        write(tmp_path, f"n{seed}", simulated("none", seed))
        write(tmp_path, f"d{seed}", simulated("dgc", seed, scores=(0.5, 0.6, None, None)))
    write(tmp_path, "s0", simulated("strom", 0, scores=(0.5, None, None, None)))
    write(tmp_path, "s1", simulated("strom", 1, scores=(0.5, 0.6, 0.7, 0.8)))
    page = report(tmp_path)
    assert "dgc diverged in both runs." in page.text
    assert "strom diverged in 1 of 2 runs; otherwise it ends 10.00 points below none" in page.text
    assert page.shown("dgc", "score") == "diverged"
    assert page.value("strom", "score") == 0.8
    assert "seed 0 diverged at step 20" in page.text
    assert page.text.count("finite number") == 1


@quick
def test_a_baseline_that_is_missing_or_diverged(tmp_path):
    write(tmp_path, "b", simulated("topk"))
    assert "cannot be said yet: there is no finished run of none" in report(tmp_path).text
    write(tmp_path, "a", simulated("none", scores=(0.5, None, None, None)))
    assert "none itself diverged: mend" in report(tmp_path).text
    write(tmp_path, "c", simulated("none", 1))
    text = report(tmp_path).text
    assert "none itself diverged in 1 of 2 runs, which are not counted" in text
    assert "topk ends level with none" in text


@quick
def test_runs_until_a_score(tmp_path):
    about = {"until": "accuracy >= 0.8", "because": "until"}
    for seed in range(2):
        write(tmp_path, f"n{seed}", simulated("none", seed, stop=20, scores=(0.5, 0.8, 0.8, 0.8), sent=9000, **about))
        write(tmp_path, f"t{seed}", simulated("topk", seed, stop=30 + 5 * seed, scores=(0.4, 0.6, 0.8, 0.8), **about))
    write(tmp_path, "v", simulated("vgc", scores=(0.1, 0.2, 0.3, 0.4), sent=500, until="accuracy >= 0.8"))
    page = report(tmp_path)
    assert page.value("topk", "steps_run") == 32.5
    assert "topk reaches accuracy >= 0.8 after 32 steps, none after 20 (spread over seeds 5 steps)" in page.text
    assert "vgc does not reach accuracy >= 0.8 in 40 steps with 18.0× fewer bytes" in page.text  # noqa: RUF001
    assert page.value("", "target") == 0.8


@quick
def test_planned_steps_are_not_mixed_and_the_page_says_so(tmp_path):
    write(tmp_path, "a", simulated("none"))
    write(tmp_path, "b", simulated("topk", steps=80))
    page = report(tmp_path)
    assert "resnet on 16 simulated workers, 40 steps" in page.text
    assert "Only runs planned for 80 steps are compared here" in page.text
    assert "data-value" not in page.values["topk", "fewer_bytes"]


@quick
def test_titles_say_what_else_differs(tmp_path):
    write(tmp_path, "a", simulated("none", identity={"threads": 1, "source": "abc"}))
    write(tmp_path, "b", simulated("none", identity={"threads": 2, "source": "abc"}))
    text = report(tmp_path).text
    assert "40 steps, threads 1" in text
    assert "40 steps, threads 2" in text
    assert "source" not in text


@quick
def test_runs_that_were_made_again_are_named(tmp_path):
    write(tmp_path, "old", simulated("topk", time="2026-11-18T01", identity={"weights": "a"}))
    write(tmp_path, "new", simulated("topk", time="2026-11-18T02", identity={"weights": "b"}))
    page = report(tmp_path)
    assert "a later run of the same spec and seed: old.jsonl" in page.text
    assert "seeds" not in page.shown("topk", "score")
    assert ("topk", "run_score", "old.jsonl") not in page.values


@quick
def test_simulated_and_real_runs_on_one_page(tmp_path):
    write(tmp_path, "a", simulated("none", ms=100))
    write(tmp_path, "b", events("none"))
    page = report(tmp_path)
    assert page.value("none", "run_predicted_seconds", "a.jsonl") == pytest.approx(4)
    assert page.value("none", "run_seconds", "b.jsonl") == pytest.approx(4)
    assert ("none", "run_seconds", "a.jsonl") not in page.values


# ---- the page ------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize(
    ("network", "latency", "kernel", "emulated"),
    [
        ("throttled", None, False, True),
        ("throttled", "1ms", False, True),
        ("netns", "1ms", False, True),
        ("netns", "1ms", True, False),
        ("netns", None, False, False),
    ],
)
def test_an_emulated_link_is_called_so(tmp_path, network, latency, kernel, emulated):
    write(tmp_path, "a", events("none", network=network, latency=latency, kernel_latency=kernel))
    text = report(tmp_path).text
    assert ("EMULATED" in text) == emulated
    assert ("1ms" in text) == (latency is not None)


@pytest.fixture(scope="module")
def rich(tmp_path_factory) -> Path:
    """A folder with all there is: seeds, a long and a hostile name, an unfinished run, a map. Reported already."""
    folder = tmp_path_factory.mktemp("rich")
    for seed in range(3):
        write(folder, f"none{seed}", events("none", seed, ms=200 + seed, sent=90_000, hook=False))
        write(folder, f"topk{seed}", events("topk", seed, ms=30 + seed, scores=(0.6, 0.7, 0.8, 0.89)))
    write(folder, "long", events("ErrorFeedback(AllGather(TopK(ratio=0.001, values=RangeFloat(bits=8))))", ms=20))
    write(folder, "hostile", events(HOSTILE, command=HOSTILE, environment={HOSTILE: HOSTILE}))
    write(folder, "unfinished", events("sidco")[:6])
    (folder / "map.json").write_text(
        json.dumps({"workload": "fashion", "workers": 4, "baseline": "best dense", "cells": CELLS, "command": HOSTILE})
    )
    write_report(folder)
    return folder


def test_hostile_names_stay_text(rich):
    html = (rich / "report.html").read_text()
    page = Page(html)
    assert "script" not in page.tags
    assert HOSTILE in page.text
    assert page.value(HOSTILE, "score") == 0.9
    assert escape(HOSTILE) in html


def test_nothing_is_loaded_from_elsewhere(rich):
    html = (rich / "report.html").read_text()
    page = Page(html)
    assert not re.findall(r"https?://|url\(|@import", html)
    assert page.sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert page.tags.isdisjoint({"link", "script", "iframe", "object"})
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    for source in page.sources:
        picture = base64.b64decode(source.partition(",")[2]).decode()
        ElementTree.fromstring(picture)
        loaded = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', picture)
        assert all("".join(target).startswith("#") for target in loaded), "its own parts only"
        assert "prefers-color-scheme:dark" in picture


def test_every_picture_has_words_and_a_png(rich):
    page = Page((rich / "report.html").read_text())
    assert len(page.alts) == 6
    assert all(len(alt) > 30 for alt in page.alts)
    assert "none ends at 90.00 % after 8.04 seconds" in page.alts[0]
    names = {"score-time", "score-bytes", "loss", "density", "step-time", "map"}
    assert {path.stem for path in rich.glob("*.png")} == names
    for path in rich.glob("*.png"):
        with Image.open(path) as image:
            assert min(image.size) > 150
            assert len(image.convert("RGB").getcolors(1 << 24)) > 10, "not blank"


def test_the_page_can_go_elsewhere_and_comes_out_the_same(rich, tmp_path):
    page = write_report(rich, tmp_path / "new" / "page.html")
    assert page == tmp_path / "new" / "page.html"
    assert page.read_text() == (rich / "report.html").read_text()
    assert (tmp_path / "new" / "map.png").exists()


@quick
def test_the_page_can_go_into_another_folder(rich, tmp_path):
    assert write_report(rich, tmp_path / "new") == tmp_path / "new" / "report.html"


# ---- the map and the demo ------------------------------------------------------------------------


def test_the_map_is_blue_where_compression_wins(tmp_path):
    cells = [Cell(**cell) for cell in CELLS]
    axes = plots.map_figure(cells).axes[0]
    colours = [patch.get_facecolor() for patch in axes.patches]
    for cell, (red, _, blue, _) in zip(cells, colours, strict=True):
        assert (blue - red > 0.3) == (cell.ratio < 1)
        assert (red - blue > 0.3) == (cell.ratio > 1)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10Mbit", "1Gbit"], "slow to fast"
    assert [text.get_text() for text in axes.texts] == ["1.0", "1.0", "0.10", "3.0"]
    assert plots.heat_map(CELLS, tmp_path / "map.png").stat().st_size > 1000


def test_a_map_alone_is_a_report(tmp_path):
    about = {"workload": "fashion", "workers": 4, "baseline": "best dense", "cells": CELLS[:3], "command": "x"}
    (tmp_path / "map.json").write_text(json.dumps(about))
    page = report(tmp_path)
    assert page.value("topk", "map_ratio", "10Mbit") == 0.1
    assert page.shown("topk", "map_ratio", "1Gbit") == "–", "not measured"  # noqa: RUF001
    assert page.shown("none", "map_ratio", "10Mbit") == "1.0900 ms"


def test_the_demo_is_drawn(tmp_path):
    runs = {spec: events(spec) for spec in ("none", "topk")}
    assert plots.demo(runs, "title", tmp_path / "demo.png").stat().st_size > 1000


# ---- in a real browser ---------------------------------------------------------------------------

SPECS = {  # final score, bytes and predicted milliseconds of a step, waiting
    "none": (0.905, 2_590_000, 2490, None),
    "bf16": (0.904, 1_300_000, 1580, None),
    "topk4": (0.902, 90_000, 720, 0.71),
    "topk": (0.897, 64_000, 610, 0.88),
    "vgc": (0.82, 30_000, 590, 0.97),
    "ErrorFeedback(AllGather(TopK(ratio=0.001, values=RangeFloat(bits=8))))": (0.873, 9_000, 560, 0.99),
    "ErrorFeedback(AllGather(TopK(ratio=0.002, values=RangeFloat(bits=8))))": (0.8731, 9_000, 560, 0.99),
}


def rising(final: float, seed: int) -> tuple[float, ...]:
    """Twenty scores up to the final one, with a bad moment in the middle."""
    scores = [final * (1 - math.exp(-(i + 1) / 4)) - 0.002 * seed * (i % 3) for i in range(20)]
    return (*scores[:12], scores[12] - 0.05, *scores[13:19], final - 0.001 * seed)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory) -> Path:
    """Simulated runs with a network: many specs and seeds, diverged and unfinished ones. Reported already."""
    folder = tmp_path_factory.mktemp("crowded")
    about = {"steps": 200, **NETWORK}
    for number, (spec, (final, sent, ms, waiting)) in enumerate(SPECS.items()):
        for seed in range(3):
            lines = simulated(spec, seed, scores=rising(final, seed), sent=sent, ms=ms + seed, waiting=waiting, **about)
            write(folder, f"{number}-{seed}", lines)
    lost = (*rising(0.9, 0)[:7], *[None] * 13)
    write(folder, "dgc0", simulated("dgc", 0, scores=lost, sent=9000, ms=560, **about))
    write(folder, "dgc1", simulated("dgc", 1, scores=rising(0.88, 1), sent=9000, ms=560, **about))
    write(folder, "strom", simulated("strom", scores=lost, sent=8000, ms=550, **about))
    write(folder, "sidco", simulated("sidco", scores=rising(0.89, 0), sent=62_000, ms=600, **about)[:31])
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def unpriced(tmp_path_factory) -> Path:
    """Simulated runs without a network, where lower is better, and a run that goes to 1e30. Reported already."""
    folder = tmp_path_factory.mktemp("unpriced")
    about = {"metric": "perplexity", "higher_is_better": False}
    for seed in range(2):
        write(folder, f"none{seed}", simulated("none", seed, scores=(900 + seed, 300, 120, 82), sent=90_000, **about))
        write(folder, f"topk{seed}", simulated("topk", seed, scores=(950, 400, 150, 90 + seed), **about))
    write(folder, "dgc", simulated("dgc", scores=(900, 1e30, None, None), **about))
    write_report(folder)
    return folder


# Shows a page in two frames, with every figure as SVG in the page instead of in an image, so that its parts can be
# measured; and writes down what was found.
MEASURE = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe id="phone" width="390" height="844" style="border:0" srcdoc="{page}"></iframe>
<iframe id="desk" width="1280" height="900" style="border:0" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
const rect = e => {{ const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; }};
addEventListener("load", () => {{
  const found = {{}};
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument, root = page.documentElement;
    const figures = page.querySelector(".figures");
    found[frame.id] = {{
      width: root.clientWidth, content: Math.max(root.scrollWidth, page.body.scrollWidth),
      paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
      images: [...page.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.clientWidth]),
      columns: figures ? getComputedStyle(figures).gridTemplateColumns.split(" ").length : 0,
      scrolls: [...page.querySelectorAll(".scroll")].map(s => [s.clientWidth, s.scrollWidth]),
      smallest: Math.min(...[...page.querySelectorAll("td, li, small")].map(
        e => parseFloat(getComputedStyle(e).fontSize))),
      figures: [...page.images].map(image => {{
        const bytes = Uint8Array.from(atob(image.src.split(",")[1]), c => c.charCodeAt(0));
        const text = new TextDecoder().decode(bytes);
        const holder = page.createElement("div");
        holder.style.width = image.clientWidth + "px";
        holder.append(page.adoptNode(new DOMParser().parseFromString(text, "image/svg+xml").documentElement));
        holder.firstChild.setAttribute("width", "100%");
        holder.firstChild.removeAttribute("height");
        page.body.append(holder);
        const words = [...holder.querySelectorAll("[id^=name-], [id^=text_]")];
        const name = holder.querySelector("[id^=name-] > :last-child");
        const size = {{
          figure: rect(holder.firstChild), words: words.map(e => [e.id, ...rect(e)]),
          ink: name && frame.contentWindow.getComputedStyle(name).fill, alt: image.alt,
        }};
        holder.remove();
        return size;
      }}),
    }};
  }}
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>"""


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Opens a page in headless Chromium and gives its DOM."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium executable (Debian: apt-get install chromium)")
    profile = tmp_path_factory.mktemp("profile")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

    def run(page: Path, *more: str) -> str:
        command = [program, *flags, f"--user-data-dir={profile}", *more, page.as_uri()]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    blank = tmp_path_factory.mktemp("blank") / "blank.html"
    blank.write_text("<p>here")
    try:
        seen = run(blank, "--dump-dom")
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"{program} does not start here: {error}")
    assert "<p>here" in seen
    return run


@pytest.fixture(scope="module")
def measure(browse, tmp_path_factory):
    """Measures a page in a frame as wide as a phone and in one as wide as a desk, in light or dark mode."""

    def run(html: str, dark: bool = False) -> dict:
        wrapper = tmp_path_factory.mktemp("wrapper") / "measure.html"
        wrapper.write_text(MEASURE.format(page=escape(html)))
        scheme = f"--blink-settings=preferredColorScheme={int(not dark)}"
        dom = browse(wrapper, "--window-size=1800,1000", scheme, "--dump-dom")
        (found,) = re.findall(r'<pre id="found">(.*?)</pre>', dom)
        return json.loads(unescape(found))

    return run


FOLDERS = ("rich", "crowded", "unpriced")


@pytest.fixture(scope="module", params=[(name, dark) for name in FOLDERS for dark in (False, True)], ids=str)
def measured(request, measure) -> tuple[dict, bool]:
    name, dark = request.param
    page = request.getfixturevalue(name) / "report.html"
    return measure(page.read_text(), dark), dark


def problems(figure: dict) -> list[str]:
    """Words of a figure that overlap, or leave the figure."""
    left, top, right, bottom = figure["figure"]
    words = [word for word in figure["words"] if word[3] > word[1]]
    found = [
        f"{name} leaves the figure"
        for name, x0, y0, x1, y1 in words
        if x0 < left - 0.5 or y0 < top - 0.5 or x1 > right + 0.5 or y1 > bottom + 0.5
    ]
    for (a, ax0, ay0, ax1, ay1), (b, bx0, by0, bx1, by1) in itertools.combinations(words, 2):
        if min(ax1, bx1) - max(ax0, bx0) > 0.5 and min(ay1, by1) - max(ay0, by0) > 0.5:
            found.append(f"{a} overlaps {b}")
    return found


def test_browser_shows_names_apart(measured):
    for frame in measured[0].values():
        for figure in frame["figures"]:
            assert problems(figure) == [], figure["alt"]
        names = [sum(word[0].startswith("name-") for word in figure["words"]) for figure in frame["figures"]]
        assert max(names) >= 3, "the figures of curves have names"


def test_browser_would_find_names_that_are_not_apart(measure):
    words = {"name-0": (10, 10), "name-1": (30, 14), "name-2": (80, 60), "text_1": (10, 80)}
    shapes = "".join(f'<g id="{name}"><path d="M {x} {y} h 30 v 8 h -30 z"/></g>' for name, (x, y) in words.items())
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 100">{shapes}</svg>'
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    found = measure(f'<!DOCTYPE html><body><p><small>x</small><img src="{source}" width="300" height="300">')
    (figure,) = found["phone"]["figures"]
    assert problems(figure) == ["name-2 leaves the figure", "name-0 overlaps name-1"]


def test_browser_shows_every_figure(measured):
    for frame in measured[0].values():
        assert len(frame["images"]) >= 4
        for complete, width, height, shown in frame["images"]:
            assert complete
            assert min(width, height) > 100
            assert shown > 300


def test_browser_fits_a_phone_and_a_desk(measured):
    phone, desk = measured[0]["phone"], measured[0]["desk"]
    assert (phone["width"], desk["width"]) == (390, 1280)
    assert phone["content"] <= 390, "the page itself does not scroll sideways"
    assert desk["content"] <= 1280
    assert any(content > width for width, content in phone["scrolls"]), "wide tables scroll by themselves"
    assert (phone["columns"], desk["columns"]) == (1, 2)
    assert phone["smallest"] >= 12


def test_browser_follows_light_and_dark(measured):
    found, dark = measured
    for frame in found.values():
        paper = _luminance(frame["paper"])
        assert (paper < 0.05) == dark
        assert (paper > 0.95) != dark
        inks = [_luminance(figure["ink"]) for figure in frame["figures"] if figure["ink"]]
        assert inks
        contrasts = [(max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) for ink in inks]
        assert min(contrasts) > 3, "names can be read"


def _luminance(colour: str) -> float:
    """Relative luminance of rgb(r, g, b), as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


@pytest.mark.parametrize("folder", FOLDERS)
def test_browser_reads_the_same_numbers(folder, browse, request):
    page = request.getfixturevalue(folder) / "report.html"
    written, seen = Page(page.read_text()), Page(browse(page, "--dump-dom"))
    assert seen.values == written.values
    assert "script" not in seen.tags


def test_browser_shows_the_numbers_of_the_data(crowded, browse):
    """Computed here from the lines of the files, and compared with both the attributes and the words in the table."""
    page = Page(browse(crowded / "report.html", "--dump-dom"))
    runs: dict[str, list[list[dict]]] = {}
    for file in crowded.glob("?-?.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        runs.setdefault(lines[0]["spec"], []).append(lines)
    assert set(runs) == set(SPECS)
    plain = np.median([lines[-1]["sent"] / lines[-1]["step"] for lines in runs["none"]])
    for spec, several in runs.items():
        scores = [np.array([line["score"] for line in lines if line["event"] == "eval"]) for lines in several]
        expected = {
            "score": ([s[-1] for s in scores], 100),
            "predicted_ms_per_step": ([1e3 * lines[-1]["seconds"] / lines[-1]["step"] for lines in several], 1),
            "worst_drop": ([(np.maximum.accumulate(s) - s).max() for s in scores], 100),
        }
        for key, (values, scale) in expected.items():
            cell = page.values[spec, key]
            found = [float(cell[f"data-{which}"]) for which in ("value", "min", "max")]
            assert found == pytest.approx([np.median(values), min(values), max(values)]), (spec, key)
            shown = float(re.match(r"[\d.,]+", cell["shown"])[0].replace(",", ""))
            assert shown == pytest.approx(scale * np.median(values), rel=0.006, abs=0.006), (spec, key)
        ratio = plain / np.median([lines[-1]["sent"] / lines[-1]["step"] for lines in several])
        assert page.value(spec, "fewer_bytes") == pytest.approx(ratio)
        late = [line["waiting"] for line in several[0] if line["event"] == "step" and line["step"] > 100]
        if late[0] is not None:
            assert page.value(spec, "waiting") == pytest.approx(np.mean(late))
    assert page.value("topk", "lead_gap") == pytest.approx(page.value("topk", "score") - page.value("none", "score"))


def test_browser_takes_a_screenshot_in_the_dark(crowded, browse, tmp_path):
    picture = tmp_path / "page.png"
    dark = "--blink-settings=preferredColorScheme=0"
    browse(crowded / "report.html", "--window-size=500,844", f"--screenshot={picture}", dark)
    with Image.open(picture) as image:
        assert image.size == (500, 844)
        colours = image.convert("L").getcolors()
    assert max(colours)[1] < 60, "the paper is dark"
    ink = [level for _, level in colours]
    assert max(ink) - min(ink) > 180, "there is readable text on it"


# ---- from training to the page, for real ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(networks.permitted() is not None, reason=str(networks.permitted()))
def test_two_minutes_of_training_and_their_page(tmp_path, browse):
    specs = ["none", "torch:bf16", "topk", "sidco"]
    link = ["--workers", "4", "--bandwidth", "100Mbit", "--network", "netns"]
    assert main(["train", *specs, "--workload", "digits", *link, "--steps", "100", "--out", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path)]) == 0
    page = Page(browse(tmp_path / "report.html", "--dump-dom"))
    lasts = {}
    for file in tmp_path.glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lasts[lines[0]["spec"]] = lines[-1]
    assert set(lasts) == set(specs)
    for spec, last in lasts.items():
        assert page.value(spec, "score") == pytest.approx(last["score"])
        step = lasts["none"]["seconds"] / last["seconds"]
        assert page.value(spec, "speedup") == pytest.approx(step, rel=0.02)
    assert page.value("topk", "speedup") > 1.5, "a hundredth of the bytes on a slow link, and no gain"
