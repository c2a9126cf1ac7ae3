"""``tersegrad simulate``: the scores of real processes, runs that survive, and messages."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import tersegrad
from support import simulate_cases as cases
from tersegrad.cli import main
from tersegrad.core import Layout
from tersegrad.lab.simulate import Request, plan
from tersegrad.lab.until import Until
from tersegrad.plan.cost import Link
from tersegrad.plan.model import compute_of
from tersegrad.plan.step_time import StepTime
from tersegrad.specs import PRESETS, parse_reducer

SMALL = ["--workload", "digits", "--workers", "2"]


def events(folder):
    """Of the one run in a folder."""
    (file,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


CLOCKS = ("wall", "time", "seconds", "compute_ms")


def timeless(lines):
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


factory = cases.narrow


def runs(specs, steps=24, **how):
    return tersegrad.simulate(factory, specs, workers=3, steps=steps, **how)


# ---- the real thing ------------------------------------------------------------------------------


def test_scores_are_those_of_real_processes(tmp_path):
    common = ["topk4", *SMALL, "--steps", "22", "--eval-every", "11", "--bucket-cap-mb", "4096"]
    assert main(["train", *common, "--network", "none", "--out", str(tmp_path / "real")]) == 0
    assert main(["simulate", *common, "--out", str(tmp_path / "virtual")]) == 0
    real, virtual = events(tmp_path / "real"), events(tmp_path / "virtual")
    for lines in (real, virtual):
        assert [line["step"] for line in lines if line["event"] == "eval"] == [11, 22]
    scores = [[(e["step"], e["score"]) for e in lines if e["event"] == "eval"] for lines in (real, virtual)]
    assert scores[0] == scores[1]


@pytest.mark.slow
def test_auto_follows_the_log_of_a_real_run(tmp_path, capsys):
    spec = "Auto({'topk': AllGather(TopK(0.1))}, warmup=1, trial=3, window=5, change=1e9)"
    common = [spec, *SMALL, "--steps", "66"]
    assert main(["simulate", *common, "--out", str(tmp_path / "virtual")]) == 2
    assert "decisions of a real run" in capsys.readouterr().err
    assert main(["train", *common, "--network", "none", "--out", str(tmp_path / "real")]) == 0
    (file,) = (tmp_path / "real").glob("*.jsonl")
    assert main(["simulate", *common, "--replay", str(file), "--out", str(tmp_path / "virtual")]) == 0
    real, virtual = events(tmp_path / "real")[-1], events(tmp_path / "virtual")[-1]
    assert (real["score"], real["decisions"]) == (virtual["score"], virtual["decisions"])


# ---- runs that survive ---------------------------------------------------------------------------


LONG = {"steps": 150, "eval_every": 20, "bandwidth": "10Mbit", "compute": "20ms"}

_KILLED = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import tersegrad
from support.simulate_cases import narrow
tersegrad.simulate(narrow, "sidco", workers=3, **{long!r}, snapshot_seconds=0.0, out={out!r})
"""


def test_a_killed_run_goes_on_to_the_bit(tmp_path):
    """Its snapshots are made in every step; it is killed as soon as there is one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    script = _KILLED.format(tests=str(Path(__file__).parent.parent), long=LONG, out=str(killed))
    process = subprocess.Popen([sys.executable, "-c", script])
    while process.poll() is None and not list(killed.glob("*.snapshot")):
        time.sleep(0.01)  # until there is something to go on from
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert events(killed)[-1]["event"] != "end"
    runs("sidco", **LONG, out=killed)
    assert not list(killed.glob("*.snapshot"))
    runs("sidco", **LONG, out=whole)
    # Times are predicted from codecs that were timed in each process.
    lines = [
        [{k: v for k, v in line.items() if k != "seconds"} for line in timeless(events(f))] for f in (whole, killed)
    ]
    assert lines[0] == lines[1]
    predicted = [line["seconds"] for line in events(killed)[1:]]
    assert predicted == sorted(predicted)


def test_a_finished_run_is_not_made_again_and_another_run_is(tmp_path):
    runs(["topk"], out=tmp_path)
    (file,) = tmp_path.glob("*.jsonl")
    made = file.stat().st_mtime_ns
    runs(["topk"], out=tmp_path)
    assert file.stat().st_mtime_ns == made
    runs(["topk"], out=tmp_path, steps=25)
    runs(["topk8"], out=tmp_path)
    runs(["topk"], out=tmp_path, seeds=[1])
    runs(["topk"], out=tmp_path, bandwidth="10Mbit", compute="1ms")
    tersegrad.simulate(lambda: cases.training("none", 0, wide=51), "topk", workers=3, steps=24, out=tmp_path)
    assert len(list(tmp_path.glob("*.jsonl"))) == 6
    assert file.stat().st_mtime_ns == made


def test_a_preset_with_another_meaning_is_another_run(tmp_path, monkeypatch):
    request = Request(("topk",), 2, 10, (0,), tmp_path, "a net", "")
    before = plan(request, factory)[0].file
    monkeypatch.setitem(PRESETS, "topk", replace(PRESETS["topk"], spec="ErrorFeedback(AllGather(TopK(0.5)))"))
    assert plan(request, factory)[0].file != before


_FULL_DISK = """
mount -t tmpfs -o size=1m tmpfs {folder} && mkdir {folder}/out && exec {python} - <<'END'
import sys
sys.path.insert(0, {tests!r})
import tersegrad
from support.simulate_cases import narrow as factory
kept = tersegrad.simulate(factory, "none", workers=3, steps=24, out={out!r})
open({folder!r} + "/filler", "wb").write(bytes(1 << 19))
try:
    tersegrad.simulate(factory, "topk", workers=3, steps=24, out={out!r}, snapshot_seconds=0.0)
except OSError as error:
    print(error)
print([run.spec for run in tersegrad.simulate(factory, "none", workers=3, steps=24, out={out!r})])
END
"""


def test_a_disk_that_is_full_in_the_middle(tmp_path):
    tests, out = str(Path(__file__).parent.parent), str(tmp_path / "out")
    script = _FULL_DISK.format(folder=str(tmp_path), python=sys.executable, tests=tests, out=out)
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if (done.returncode and "unshare" in done.stderr) or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr}")
    assert "could not be written in step" in done.stdout, done.stderr
    assert "Finished runs and the last snapshot of this one are kept" in done.stdout
    assert done.stdout.splitlines()[-1] == "['none']"


# ---- what is written -----------------------------------------------------------------------------


def test_an_own_model_in_python(tmp_path):
    plain, sparse = runs(["none", "topk"], steps=60, out=tmp_path, bandwidth="10Mbit", latency="5ms", compute="20ms")
    assert plain.end.score > 0.8
    assert plain.step_sent > 20 * sparse.step_sent
    assert plain.step_seconds > sparse.step_seconds > 0.02
    assert 0.3 < sparse.waiting < 1
    assert plain.waiting == 0
    assert (tmp_path / "report.html").exists()
    assert runs("topk")[0].end.seconds is None  # no network, no time


def test_until_ends_a_run(tmp_path):
    (run,) = runs("none", steps=200, eval_every=5, until="accuracy >= 0.5")
    assert run.because == "until"
    assert 0 < run.end.step < 200
    assert run.end.score >= 0.5
    assert Until.parse("perplexity<80").holds(79.0)
    for text in ("accuracy", "accuracy >= high", ">= 3", "accuracy => 0.9"):
        with pytest.raises(ValueError, match="write a metric"):
            Until.parse(text)
    with pytest.raises(ValueError, match="is called 'accuracy'"):
        runs("none", until="loss < 1")


def test_a_run_that_diverges_says_so():
    def diverging(seed):
        made = factory(seed)
        made.schedule = None
        made.optimizer.param_groups[0]["lr"] = 1e30
        return made

    (run,) = tersegrad.simulate(diverging, "none", workers=2, steps=50)
    assert run.because == "diverged"
    assert run.end.step < 50


def test_predicted_times_follow_the_bytes():
    layouts = [Layout(("a",), ((400, 500),)), Layout(("b",), ((300, 500),))]
    gradients = [torch.randn(layout.numel) for layout in layouts]
    link, compute = Link(1e6, 0.01), compute_of(0.06, layouts)
    for spec, alone in (("none", 2 * 3 / 4 * 4 * 350_000), ("topk", None)):
        made = StepTime.measured(parse_reducer(spec), layouts, gradients, 4, link, compute)
        again = StepTime.from_dict(json.loads(json.dumps(made.as_dict())))
        slow, fast = again.seconds(2e6), again.seconds(1e5)
        assert slow - fast == pytest.approx(1.9, rel=0.05)
        if alone is not None:
            assert again.seconds(alone) == pytest.approx(0.06 * 2 / 3 + alone / 1e6 + 12 * 0.01, rel=0.3)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["none"], "say how long a run is"),
        (["none", "--steps", "5"], "say what is trained"),
        (["none", "--steps", "5", "--workload", "digits", "--model", "a:b"], "say what is trained"),
        (["none", "--epochs", "5", "--model", "a:b"], "--epochs is for a workload"),
        (["none", "--steps", "5", "--model", "nowhere:factory"], "nowhere"),
        (["none", "--steps", "5", "--model", "a:b", "--batch", "3"], "--batch cannot change a model of your own"),
        (["torch:bf16", "--steps", "5", *SMALL], "only real processes can run"),
        (["none", "--steps", "5", *SMALL, "--compute", "5ms"], "say what the network is"),
        (["none", "--steps", "5", *SMALL, "--until", "bleu > 3"], "is called 'accuracy'"),
        (["none", "--steps", "5", *SMALL, "--bandwidth", "fast"], "fast"),
        (["none", "--steps", "5", "--workload", "digits", "--workers", "900"], "do not fill one batch"),
        (["auto", "--steps", "5", *SMALL], "decisions of a real run"),
        (["none", "--steps", "5", *SMALL, "--threads", "2", "--processes", "2"], "cannot use torch's threads"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(argv, text, tmp_path, capsys):
    assert main(["simulate", *argv, "--out", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_loss_that_fails_in_the_middle_keeps_what_is_finished(tmp_path):
    def failing(seed, spec):
        made = factory(seed)
        if spec == "topk":
            made.loss = lambda model, batch: model(batch[0])
        return made

    with pytest.raises(TypeError, match="a tensor of shape"):
        tersegrad.simulate(failing, ["none", "topk"], workers=2, steps=10, out=tmp_path)
    (run,) = tersegrad.simulate(failing, "none", workers=2, steps=10, out=tmp_path)
    assert run.finished


def test_what_a_worker_carries_is_its_own_and_is_saved(tmp_path):
    """Recurrent state, over epochs and a resumption."""

    def carrying(seed):
        model = nn.LSTM(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def batches(worker, workers, epoch):
            draw = torch.Generator().manual_seed(10 * epoch + worker)
            return [torch.randn(3, 2, 4, generator=draw) for _ in range(5)]

        def loss(model, batch, carried):
            out, (h, c) = model(batch, carried)
            return functional.mse_loss(out, torch.zeros_like(out)), (h.detach(), c.detach())

        return tersegrad.Training(model, optimizer, batches, loss, lambda m: float(m.weight_ih_l0.sum()), carries=True)

    from tersegrad.hosts.training import make

    def made():
        return tersegrad.Simulation(make(carrying, seed=0), "topk", 2)

    whole, first, second = made(), made(), made()
    for _ in range(12):
        whole.step()
    for _ in range(8):
        first.step()
    torch.save(first.state_dict(), tmp_path / "state")
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=False))
    for _ in range(4):
        second.step()
    assert whole.evaluate() == second.evaluate()
    assert whole.epochs == second.epochs == 2.4
