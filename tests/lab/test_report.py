"""The report says what the result files say: in its HTML, and in a real browser on a phone and on a desk."""

import base64
import json
import math
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tersegrad.cli import main
from tersegrad.lab import network as networks
from tersegrad.lab import plots
from tersegrad.lab.report import write_report
from tersegrad.lab.results import Cell, read_folder, read_run

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


def write(folder: Path, name: str, lines, tail: str = "") -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines) + tail
    (folder / f"{name}.jsonl").write_bytes(text.encode("latin-1"))


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
    assert "no run of none here" in page.text
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
    assert "no finite score" in page.text


@quick
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "has no runs to report: no .jsonl file"),
        ("a.jsonl", "", "cut off before the first line"),
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

MEASURE = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe id="phone" width="390" height="844" style="border:0" srcdoc="{page}"></iframe>
<iframe id="desk" width="1280" height="900" style="border:0" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => {{
  const found = {{}};
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument, root = page.documentElement;
    found[frame.id] = {{
      width: root.clientWidth, content: Math.max(root.scrollWidth, page.body.scrollWidth),
      images: [...page.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.clientWidth]),
      columns: getComputedStyle(page.querySelector(".figures")).gridTemplateColumns.split(" ").length,
      scrolls: [...page.querySelectorAll(".scroll")].map(s => [s.clientWidth, s.scrollWidth]),
      smallest: Math.min(...[...page.querySelectorAll("td, li, small")].map(
        e => parseFloat(getComputedStyle(e).fontSize))),
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
        pytest.skip("no chromium executable (Debian: apt install chromium)")
    profile = tmp_path_factory.mktemp("profile")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

    def run(page: Path, *more: str) -> str:
        command = [program, *flags, f"--user-data-dir={profile}", *more, page.as_uri()]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    return run


@pytest.fixture(scope="module")
def measured(rich, browse, tmp_path_factory) -> dict:
    """Sizes of the page in a frame as wide as a phone, and in one as wide as a desk."""
    wrapper = tmp_path_factory.mktemp("wrapper") / "measure.html"
    wrapper.write_text(MEASURE.format(page=escape((rich / "report.html").read_text())))
    dom = browse(wrapper, "--window-size=1800,1000", "--dump-dom")
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', dom)
    return json.loads(found)


def test_browser_shows_every_picture(measured):
    for frame in measured.values():
        assert len(frame["images"]) == 6
        for complete, width, height, shown in frame["images"]:
            assert complete
            assert min(width, height) > 100
            assert shown > 300


def test_browser_fits_a_phone(measured):
    phone, desk = measured["phone"], measured["desk"]
    assert phone["width"] == 390
    assert phone["content"] <= 390, "the page itself does not scroll sideways"
    assert any(content > width for width, content in phone["scrolls"]), "wide tables scroll by themselves"
    assert phone["columns"] == 1
    assert desk["columns"] == 2
    assert desk["content"] <= 1280
    assert phone["smallest"] >= 12


def test_browser_reads_the_same_numbers(rich, browse):
    written = Page((rich / "report.html").read_text())
    seen = Page(browse(rich / "report.html", "--dump-dom"))
    assert seen.values == written.values
    assert "script" not in seen.tags
    assert seen.value("topk", "speedup") == pytest.approx(201 / 31)


@pytest.mark.parametrize(("scheme", "dark"), [(1, False), (0, True)])
def test_browser_follows_light_and_dark(rich, browse, tmp_path, scheme, dark):
    picture = tmp_path / "page.png"
    browse(
        rich / "report.html",
        "--window-size=500,844",
        f"--screenshot={picture}",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    with Image.open(picture) as image:
        assert image.size == (500, 844)
        colours = image.convert("L").getcolors()
    paper = max(colours)[1]
    assert (paper < 60) == dark
    assert (paper > 240) != dark
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
