"""The demo: what it shows; and that it shows it, with two methods and next to no steps."""

import json

import pytest

from tersegrad.cli import main
from tersegrad.core import settled
from tersegrad.lab import demo
from tersegrad.reducers import VGC, GradiVeQ
from tersegrad.specs import PRESETS, parse_reducer


def test_the_four_papers_are_shown_beside_uncompressed_bf16_and_what_is_recommended():
    papers = [name for name, preset in PRESETS.items() if preset.group == "The four papers"]
    assert len(papers) == 4
    assert {name.rstrip("*") for name in demo.SPECS} == {"none", "bf16", *papers, "topk4"}


@pytest.mark.parametrize("name", [name for name in demo.SPECS if not name.endswith("*")])
def test_presets_are_shown_as_they_are(name):
    assert demo.SPECS[name] == name


def test_phases_end_within_the_demo():
    gradiveq, topk4 = parse_reducer(demo.SPECS["gradiveq*"]), parse_reducer(demo.SPECS["topk4*"])
    steps = 11 * demo.EPOCHS
    assert isinstance(gradiveq, GradiVeQ)
    assert gradiveq.warmup + gradiveq.learn < steps / 4
    assert topk4.active(None, steps // 4) == settled(parse_reducer("topk4")), "the preset past its beginning"
    assert any(isinstance(part, VGC) for part in parse_reducer(demo.SPECS["vgc"]).walk())


def test_a_table_a_picture_and_numbers(tmp_path, capsys):
    assert (
        main(["demo", "topk", "--workers", "2", "--epochs", "1", "--bandwidth", "1Gbit", "--out", str(tmp_path)]) == 0
    )
    text = capsys.readouterr().out
    assert [line.split()[1] for line in text.splitlines() if line.startswith("│")] == ["none", "topk"]
    events = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events].count("end") == 2
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"
