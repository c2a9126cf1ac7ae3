"""Files of simulated runs are read as they are, and only runs that may be compared are."""

import itertools
import json
import math
from pathlib import Path

import pytest

from tersegrad.lab.results import compare, read_folder, read_run

STEPS = 40
NETWORK = {"bandwidth": "100Mbit", "latency": "20ms", "compute_ms": 250.0}
SCORES = (0.5, 0.7, 0.8, 0.9)


def write(folder: Path, name: str, lines, tail: str = "") -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines) + tail
    (folder / f"{name}.jsonl").write_bytes(text.encode("latin-1"))


def simulated(
    spec: str,
    seed: int = 0,
    *,
    scores=SCORES,
    sent: int = 1000,
    ms: float | None = None,
    waiting: float | None = 0.5,
    density: float = 0.01,
    stop: int | None = None,
    steps: int = STEPS,
    because: str = "steps",
    **about,
):
    """The lines of a finished simulated run: a step line every 5 steps, an evaluation after every quarter.

    Args:
        spec: The method.
        seed: Of the run.
        scores: Of the evaluations; None is a score that is not finite, and so is the loss from there on.
        sent: Bytes in a step.
        ms: Predicted for a step; None: no network was given.
        waiting: Share of the energy in residuals in the last half; a tenth of it before.
        density: Share of the elements sent.
        stop: The last step, if it is not the planned one.
        steps: Planned.
        because: Why it ended.
        about: Other fields of the first line.
    """
    start = {
        "event": "start", "spec": spec, "expression": f"Expression({spec})", "workload": "my.models:resnet",
        "metric": "accuracy", "higher_is_better": True, "workers": 16, "bandwidth": None, "latency": None,
        "network": "simulated", "kernel_latency": False, "seed": seed, "learning_rate": None, "parameters": 422000,
        "batch": None, "steps": steps, "epochs": None, "limit_seconds": None, "compute_ms": None, "until": None,
        "identity": {"spec": spec, "seed": seed, "workload": "my.models:resnet", "steps": steps},
        "command": "tersegrad simulate & wait", "environment": {"torch": "2.13.0"},
        "time": f"2026-11-18T06:00:{seed:02}",
    }  # fmt: skip
    lines = [start | about]
    last, quarter, score = stop or steps, steps // len(scores) if scores else steps, None
    for step in range(5, last + 1, 5):
        at = {"step": step, "sent": step * sent, "accounted": step * sent, "wall": 0.01 * step}
        at["seconds"] = None if ms is None else step * ms / 1000
        number = min(step // quarter, len(scores)) - 1 if scores else -1
        lost = number >= 0 and scores[number] is None
        parts = {"encode": None, "wait": None, "decode": None, "density": density}
        held = waiting if waiting is None or 2 * step > last else waiting / 10
        lines.append({"event": "step", "loss": None if lost else 2 / step, **at, **parts, "waiting": held})
        if number >= 0 and (step % quarter == 0 or step == last):
            score = scores[number]
            lines.append({"event": "eval", "epoch": step / 10, "score": score, **at})
    return [*lines, {"event": "end", "score": score, "because": because, **at}]


def run_of(folder: Path, lines):
    write(folder, "run", lines)
    return read_run(folder / "run.jsonl")


# ---- one run -------------------------------------------------------------------------------------


def test_a_simulated_run_without_a_network(tmp_path):
    run = run_of(tmp_path, simulated("topk"))
    assert run.setting.simulated
    assert run.finished
    assert run.seconds is None
    assert run.step_seconds is None
    assert run.compute is None
    assert run.setting.batch is None
    assert run.step_sent == 1000
    assert run.wall == pytest.approx(0.4)
    assert run.because == "steps"
    reached = run.reach(0.75)
    assert reached.seconds is None
    assert reached.sent == pytest.approx(25_000)
    assert run.parts == {}


def test_a_simulated_run_with_a_network(tmp_path):
    run = run_of(tmp_path, simulated("topk", ms=80, **NETWORK))
    assert run.step_seconds == pytest.approx(0.08)
    assert run.reach(0.75).seconds == pytest.approx(2.0)
    assert run.compute == 0.25
    assert run.parts == {}, "the phases of a step are not measured"


@pytest.mark.parametrize(
    ("scores", "higher", "drop"),
    [
        ((0.5, 0.8, 0.6, 0.9), True, 0.2),
        ((0.5, 0.6, 0.7, 0.8), True, 0.0),
        ((0.9, 0.8, 0.85, 0.5), True, 0.4),
        ((100, 50, 80, 40), False, 30),
        ((100, 50, 40, 30), False, 0),
        ((0.5, None, 0.4, 0.9), True, 0.1),
        ((0.5,), True, None),
    ],
)
def test_the_worst_drop_is_below_the_best_before_it(tmp_path, scores, higher, drop):
    run = run_of(tmp_path, simulated("topk", scores=scores, higher_is_better=higher))
    assert run.worst_drop == (None if drop is None else pytest.approx(drop))


def test_waiting_is_the_mean_of_the_last_half(tmp_path):
    assert run_of(tmp_path, simulated("topk", waiting=0.8)).waiting == pytest.approx(0.8)
    assert run_of(tmp_path, simulated("none", waiting=None)).waiting is None


@pytest.mark.parametrize(
    ("scores", "step"),
    [((0.5, 0.7, 0.8, 0.9), None), ((0.5, None, 0.8, 0.9), None), ((0.5, 0.6, None, None), 30), ((None,) * 4, 10)],
)
def test_a_run_diverged_if_it_did_not_recover(tmp_path, scores, step):
    assert run_of(tmp_path, simulated("topk", scores=scores)).diverged == step


def test_a_loss_that_is_not_finite_is_enough(tmp_path):
    lines = simulated("topk", scores=(0.5, 0.6, 0.1, 0.1))
    lost = [line | ({"loss": math.nan} if line["event"] == "step" and line["step"] > 22 else {}) for line in lines]
    assert run_of(tmp_path, lost).diverged == 25, "the accuracy of NaN weights is finite"


def test_a_run_that_stopped_because_it_diverged(tmp_path):
    *lines, end = simulated("topk", scores=(), stop=15)
    run = run_of(tmp_path, [*lines, end | {"because": "diverged", "step": 17}])
    assert run.diverged == 17, "though all losses in the file are finite, and nothing was evaluated"
    run = run_of(tmp_path, [lines[0], end | {"because": "diverged", "step": 0, "sent": 0}])
    assert run.diverged == 0
    assert run.step_sent == 0


def test_without_evaluations_a_score_of_null_means_nothing(tmp_path):
    run = run_of(tmp_path, simulated("topk", scores=()))
    assert run.diverged is None
    assert math.isnan(run.end.score)


# ---- which runs are compared ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"steps": 80},
        {"until": "accuracy >= 0.9"},
        {"bandwidth": "1Gbit"},
        {"latency": "1ms"},
        {"workers": 8},
        {"learning_rate": 0.1},
        {"higher_is_better": False},
        {"metric": "bleu"},
        {"batch": 32},
    ],
)
def test_runs_in_different_settings_are_not_compared(tmp_path, other):
    write(tmp_path, "a", simulated("none"))
    write(tmp_path, "b", simulated("topk", **other))
    assert len(compare(read_folder(tmp_path).runs)) == 2


def test_simulated_and_real_runs_are_not_compared(tmp_path):
    write(tmp_path, "a", simulated("none", ms=80, batch=32, compute_ms=250.0))
    real = simulated("none", ms=80, batch=32, compute_ms=250.0, network="none")
    write(tmp_path, "b", real)
    assert [c.setting.network for c in compare(read_folder(tmp_path).runs)] == ["simulated", "none"]


def test_real_runs_of_different_lengths_are_compared(tmp_path):
    about = {"network": "none", "batch": 32, "compute_ms": 10.0, "ms": 80}
    write(tmp_path, "a", simulated("none", **about))
    write(tmp_path, "b", simulated("topk", steps=80, **about))
    assert len(compare(read_folder(tmp_path).runs)) == 1


def test_runs_of_another_identity_are_not_compared(tmp_path):
    write(tmp_path, "a", simulated("none", identity={"seed": 0, "source": "v1", "weights": "w0"}))
    write(tmp_path, "b", simulated("topk", identity={"seed": 0, "source": "v2", "weights": "w0"}))
    assert len(compare(read_folder(tmp_path).runs)) == 2


def test_weights_may_differ_by_seed_and_optimizers_by_spec(tmp_path):
    for spec, seed in itertools.product(("none", "dgc"), range(2)):
        own = {"weights": f"w{seed}", "first batch": f"b{seed}", "optimizer": f"SGD for {spec}", "expression": spec}
        write(tmp_path, f"{spec}{seed}", simulated(spec, seed, identity={"source": "v1", "seed": seed, **own}))
    (comparison,) = compare(read_folder(tmp_path).runs)
    assert comparison.differences == {}
    write(tmp_path, "other", simulated("none", 2, identity={"source": "v1", "seed": 2, **own}))
    write(tmp_path, "another", simulated("dgc", 2, identity={"source": "v1", "seed": 2, **own, "weights": "w9"}))
    (comparison,) = compare(read_folder(tmp_path).runs)
    assert set(comparison.differences) == {"weights", "optimizer"}


def test_the_last_finished_run_of_a_spec_and_seed_is_taken(tmp_path):
    write(tmp_path, "old", simulated("topk", time="2026-11-18T01", identity={"weights": "a"}, scores=(0.1, 0.2)))
    write(tmp_path, "new", simulated("topk", time="2026-11-18T02", identity={"weights": "b"}))
    write(tmp_path, "running", simulated("topk", time="2026-11-18T03", identity={"weights": "c"})[:6])
    (comparison,) = compare(read_folder(tmp_path).runs)
    assert [run.file for run in comparison.replaced] == ["old.jsonl"]
    assert [run.file for run in comparison.runs] == ["new.jsonl", "running.jsonl"]


def test_runs_that_diverged_do_not_set_the_target(tmp_path):
    write(tmp_path, "a", simulated("none", scores=(0.5, 0.6, 0.7, 0.8)))
    lines = simulated("topk", scores=(0.5, 0.6, 0.1, 0.1))
    write(tmp_path, "b", [line | ({"loss": None} if line["event"] == "step" else {}) for line in lines])
    (comparison,) = compare(read_folder(tmp_path).runs)
    assert comparison.target == 0.8


@pytest.mark.parametrize(("final", "target"), [(0.75, 0.75), (0.6, 0.8)])
def test_simulated_runs_that_learn_nothing_do_not_set_the_target(tmp_path, final, target):
    write(tmp_path, "a", simulated("none", scores=(0.5, 0.6, 0.7, 0.9)))
    write(tmp_path, "b", simulated("topk", scores=(0.5, 0.6, 0.7, 0.8)))
    write(tmp_path, "c", simulated("vgc", scores=(0.1, 0.1, 0.1, final)))
    (comparison,) = compare(read_folder(tmp_path).runs)
    assert comparison.floor == pytest.approx(0.7)
    assert comparison.target == target


@pytest.mark.parametrize(
    ("until", "target"),
    [("accuracy >= 0.85", 0.85), ("accuracy>85%", 0.85), ("loss <= 0.1", 0.9), ("accuracy >= lots", 0.9), (None, 0.9)],
)
def test_the_score_in_until_is_the_target(tmp_path, until, target):
    write(tmp_path, "a", simulated("none", until=until))
    (comparison,) = compare(read_folder(tmp_path).runs)
    assert comparison.target == target


@pytest.mark.parametrize(
    ("metric", "scores", "percent"),
    [
        ("accuracy", SCORES, True),
        ("top-5 accuracy", SCORES, True),
        ("accuracy", (50, 70, 80, 90), False),
        ("f1", SCORES, False),
    ],
)
def test_fractions_are_shown_in_percent(tmp_path, metric, scores, percent):
    write(tmp_path, "a", simulated("none", metric=metric, scores=scores))
    (comparison,) = compare(read_folder(tmp_path).runs)
    assert comparison.percent == percent


# ---- files that are not as they should be --------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"higher_is_better": "yes"}, "line 1, has higher_is_better = 'yes', which is neither true nor false"),
        ({"higher_is_better": None, "metric": "bleu"}, "line 1, has metric = 'bleu' and no higher_is_better"),
        ({"metric": None}, "line 1, has metric = None, which is not a text"),
        ({"network": "imagined"}, "has network = 'imagined', which is unknown"),
        ({"identity": None}, "line 1, has no identity"),
        ({"batch": 0}, "line 1, has batch = 0"),
        ({"until": 0.9}, "line 1, has until = 0.9, which is not a text"),
        ({"network": "none", "batch": 8}, "line 2, has seconds = None, which is not a number"),
        ({"network": "none", "ms": 10, "compute_ms": 1.0}, "has batch = None, which is not a number"),
        ({"network": "none", "ms": 10, "batch": 8}, "has compute_ms = None, which is not a number"),
    ],
)
def test_errors_name_the_field(tmp_path, about, message):
    with pytest.raises(ValueError, match=message):
        run_of(tmp_path, simulated("topk", **about))


def test_files_without_higher_is_better_know_two_metrics(tmp_path):
    for metric, higher in (("accuracy", True), ("perplexity", False)):
        run = run_of(tmp_path, simulated("topk", metric=metric, higher_is_better=None))
        assert run.setting.higher_is_better == higher


@pytest.mark.parametrize("tail", ["", '{"event": "eval", "step": 25, "sc'])
def test_an_unfinished_simulation(tmp_path, tail):
    write(tmp_path, "a", simulated("topk")[:6], tail)
    run = read_run(tmp_path / "a.jsonl")
    assert not run.finished
    assert run.last_step == 20
    assert run.wall == pytest.approx(0.2)
