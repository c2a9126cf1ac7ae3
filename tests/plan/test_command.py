"""``tersegrad plan`` as a user types it."""

import pytest

from tersegrad.cli import main
from tersegrad.core import Layout
from tersegrad.plan import command, probe
from tersegrad.plan.codecs import BucketCost, Network
from tersegrad.plan.cost import Link
from tersegrad.plan.timeline import Compute


def test_params_give_a_table_and_an_answer(capsys):
    argv = ["plan", "topk", "--params", "100k", "--workers", "4", "--bandwidth", "1Mbit", "--latency", "0.1ms"]
    assert main([*argv, "--compute", "50ms"]) == 0
    text = capsys.readouterr().out
    assert "4 workers, 1 Mbit/s, 0.1 ms a hop; 0.1 M parameters" in text
    assert [line.split()[0] for line in text.splitlines()[3:6]] == ["topk", "bf16", "none"]
    assert text.strip().splitlines()[-1].startswith("Compress with topk")


def test_a_fast_network_needs_no_compression(capsys):
    assert main(["plan", "topk", "--params", "100k", "--workers", "2", "--compute", "1s"]) == 0
    assert "Do not compress: plain float32 already hides behind backward" in capsys.readouterr().out


def test_what_is_not_known_is_said(capsys):
    assert main(["plan", "topk", "--params", "10k", "--workers", "2", "--bandwidth", "1Mbit"]) == 0
    assert "nothing hides behind it" in capsys.readouterr().out


def line_of(spec: str, text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{spec}: ")]
    return line


@pytest.mark.parametrize(("workers", "least"), [("8", "4.57"), ("16", "8.53")])
def test_vgc_is_told_from_where_on_it_pays(workers, least, capsys):
    assert main(["plan", "vgc", "--params", "20k", "--workers", workers, "--bandwidth", "1Mbit"]) == 0
    line = line_of("vgc", capsys.readouterr().out)
    assert f"pays with {workers} workers from a compression of {least} on" in line
    has = float(line.rstrip(".").split()[-1])
    assert 5 < has < 200, "VGC sends some elements in the steps that are recorded, not none and not all"


def test_fft_is_told_from_where_on_it_pays(capsys):
    told = []
    for bandwidth in ("10kbit", "1Mbit"):
        assert main(["plan", "fft", "--params", "20k", "--workers", "4", "--bandwidth", bandwidth]) == 0
        told.append(line_of("fft", capsys.readouterr().out))
    assert "fft: pays on 0.01 Mbit/s from a compression of 1" in told[0]
    least = [float(line.split("compression of ")[1].split()[0]) for line in told]
    assert 1 <= least[0] <= least[1] < 2, "a slower link asks for less"
    assert float(told[0].rstrip(".").split()[-1]) > 5
    assert main(["plan", "fft", "--params", "20k", "--workers", "4"]) == 0
    assert "pays at no compression on an unlimited link" in line_of("fft", capsys.readouterr().out)


def test_other_methods_and_single_workers_are_told_nothing(capsys):
    assert main(["plan", "topk", "--params", "10k", "--workers", "4"]) == 0
    assert "pays" not in capsys.readouterr().out
    assert main(["plan", "vgc", "--params", "10k", "--workers", "1"]) == 0
    assert "pays" not in capsys.readouterr().out


@pytest.fixture
def profile(tmp_path):
    plain = [BucketCost(250_000, 0.0, 0.0, (("all_reduce", 1_000_000),), 0)]
    half = [BucketCost(250_000, 0.001, 0.0, (("all_reduce", 500_000),), 0)]
    sparse = [BucketCost(250_000, 0.002, 0.001, (("all_gather", 10_000),), 0)]
    made = probe.Profile(
        4,
        Network.of(Link(1e6, 1e-4)),
        Compute(0.1, 0.2, 0.0, (0.2,)),
        [Layout.flat(250_000)],
        {"none": plain, "bf16": half, "topk": sparse},
        0.0,
        {},
    )
    made.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_a_profile_answers_without_measuring(profile, capsys, monkeypatch):
    monkeypatch.setattr(command.codecs, "measure_all", None)  # whoever measures fails
    assert main(["plan", "--profile", str(profile)]) == 0
    assert "4 workers, 8 Mbit/s" in capsys.readouterr().out
    assert main(["plan", "--profile", str(profile), "--bandwidth", "10Gbit", "--workers", "2"]) == 0
    text = capsys.readouterr().out
    assert "2 workers, 1e+04 Mbit/s" in text
    assert "Do not compress: plain float32 already hides" in text


def test_a_range_draws_curves(profile, tmp_path, capsys):
    picture = tmp_path / "curves.png"
    assert main(["plan", "--profile", str(profile), "--workers", "4..1024", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "workers: topk" in text
    assert "to 1024 workers: bf16" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--workers", "4"], "say what the model is"),
        (["--params", "1M", "--model", "a:b", "--workers", "4"], "say what the model is"),
        (["--params", "1M"], "say how many workers"),
        (["--params", "1M", "--workers", "8..4"], "4..1024"),
        (["--params", "1M", "--workers", "many"], "4..1024"),
        (["--params", "1M", "--workers", "4", "--bandwidth", "fast"], "not a rate"),
        (["nonsense", "--params", "1M", "--workers", "4"], "nonsense"),
    ],
)
def test_mistakes_are_told(argv, said, capsys):
    assert main(["plan", *argv]) == 2
    assert said in capsys.readouterr().err


def test_workers():
    assert command.parse_workers("4..1024") == (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert command.parse_workers("3..10") == (3, 6, 10)
