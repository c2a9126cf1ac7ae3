"""The command line as a user types it."""

import json

import numpy as np
import pytest
import torch

from tersegrad.cli import main
from tersegrad.specs import PRESETS, registry


def test_list_shows_everything(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in [*registry(), *PRESETS]:
        assert name in text
    assert "lower => fewer bytes" in text, "the comment that says which way the knob turns"


def test_inspect_splits_the_bytes(capsys):
    assert main(["inspect", "TopK(0.01)", "--numel", "10000"]) == 0
    text = capsys.readouterr().out
    assert "header 64" in text
    assert "values 400 bytes" in text
    assert "100 of 10000 elements" in text


def test_inspect_takes_a_preset_and_finds_its_compressor(capsys):
    assert main(["inspect", "topk", "bf16", "--numel", "1000"]) == 0
    text = capsys.readouterr().out
    assert "TopK(ratio=0.01)" in text
    assert "BF16()" in text


def test_bench_times_specs_beside_the_baselines(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    assert main(["bench", "TopK(0.01)", "sidco", "--numel", "50k", "--rounds", "3", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for word in ("copy", "add_", "torch.topk", "encode", "accumulate", "ratio", "density"):
        assert word in text
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["what"] for row in rows} == {"copy", "add_", "torch.topk of 1 %", "encode", "accumulate"}
    assert len(rows) == 3 * (3 + 2 * 2)
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["g.npy", "g.npz", "g.pt", "dict.pt"])
def test_inspect_reads_a_gradient_file(tmp_path, capsys, name):
    path = tmp_path / name
    vector = np.linspace(-1, 1, 300, dtype=np.float32).reshape(30, 10)
    if name == "g.npy":
        np.save(path, vector)
    elif name == "g.npz":
        np.savez(path, names=np.array(["a"]), step0=vector)
    else:
        torch.save(torch.from_numpy(vector) if name == "g.pt" else {"g": torch.from_numpy(vector)}, path)
    assert main(["inspect", "TopK(0.1)", "--gradient", str(path)]) == 0
    assert "30 of 300 elements" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["inspect", "topkk"], "tersegrad inspect: 'topkk' in 'topkk' is unknown"),
        (["bench", "topk", "Dense(1)"], "Dense"),
        (["inspect", "TopK(2)"], "above 0 and at most 1"),
        (["inspect", "topk", "--gradient", "nowhere.npy"], "nowhere.npy"),
        (["inspect", "topk", "--gradient", "gradient.csv"], "read from .pt, .npy or .npz"),
        (["demo", "topk", "--bandwidth", "fast"], "'fast' is not a rate"),
        (["demo", "TopK(0.1)"], "is a compressor"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(capsys, args, says):
    assert main(args) == 2
    assert says in capsys.readouterr().err


def test_no_command_shows_what_there_is(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "COMMAND" in capsys.readouterr().err
