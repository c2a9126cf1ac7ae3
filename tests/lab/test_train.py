"""The lab's training runs, for real: torchrun, namespaces, interruptions, and torch's own hooks beside ours."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from tersegrad.cli import main
from tersegrad.lab import network as networks
from tersegrad.lab import workloads
from tersegrad.lab.map import Cell, step_ms, with_ratios
from tersegrad.lab.methods import Method
from tersegrad.lab.train import Plan, RunFailedError, make_runs, open_network, read_events, show_progress, train
from tersegrad.specs import PRESETS

needs_namespaces = pytest.mark.skipif(networks.permitted() is not None, reason=str(networks.permitted()))


def plan(out: Path, *specs: str, **changes) -> Plan:
    base = Plan(
        specs=specs,
        workload="digits",
        workers=2,
        network="none",
        bandwidth=None,
        latency=None,
        seeds=(0,),
        epochs=None,
        steps=12,
        seconds=None,
        data=None,
        out=out,
        command="test",
        timeout=60.0,
    )
    return replace(base, **changes)


Events = list[dict]


def run(p: Plan) -> dict[str, Events]:
    assert train(p, Console(quiet=True)) == 0
    return {config.spec: read_events(Path(config.file)) for config in p.configs()}


def run_together(*plans: Plan) -> list[Events]:
    """The events of all runs of these plans, made one after the other by the same processes: starting them is slow."""
    configs = [config for p in plans for config in p.configs()]
    with open_network(configs[0]) as network, show_progress(Console(quiet=True)) as progress:
        make_runs(configs, network, progress)
    return [read_events(Path(config.file)) for config in configs]


@dataclass
class Runs:
    """The events of short runs, of which each test looks at some."""

    plain: Events
    topk: Events
    often: Events
    slow: Events
    momentum: Events


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    usual, often, slow = (tmp_path_factory.mktemp(name) for name in ("usual", "often", "slow"))
    momentum = "MomentumCorrection(Dense(), momentum=0.9, nesterov=True, masking=False)"
    events = run_together(
        plan(usual, "none", "topk"),
        plan(often, "topk", eval_every=4),
        plan(slow, "none", learning_rate=1e-6),
        plan(usual, momentum),
    )
    return Runs(*events)


def test_a_run_writes_start_steps_evaluations_and_end(tmp_path):
    events = run(plan(tmp_path, "topk", network="throttled", bandwidth="100Mbit", latency="0.1ms"))["topk"]
    assert [events[0]["event"], events[-1]["event"]] == ["start", "end"]
    assert events[0]["expression"] == "ErrorFeedback(AllGather(TopK(ratio=0.01)))"
    assert events[0]["compute_ms"] > 0
    assert (events[0]["epochs"], events[0]["steps"], events[0]["limit_seconds"]) == (None, 12, None)
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 13))
    assert all(b["seconds"] > a["seconds"] and b["sent"] > a["sent"] for a, b in pairwise(steps))
    assert steps[-1]["density"] == pytest.approx(0.01, rel=0.01)
    assert steps[-1]["wait"] > 0
    parts = [steps[-1][part] for part in ("forward", "backward", "update")]
    assert min(parts) > 0
    assert sum(parts) < steps[-1]["seconds"]
    assert events[-1]["score"] == [e for e in events if e["event"] == "eval"][-1]["score"]


def test_evaluations_can_be_more_frequent_than_epochs_and_change_nothing(runs):
    """And the last step is evaluated once, whether or not it is one of them."""
    often, seldom = runs.often, runs.topk
    assert [e["step"] for e in often if e["event"] == "eval"] == [4, 8, 12]
    assert [e["step"] for e in seldom if e["event"] == "eval"] == [12]
    assert often[-1]["score"] == seldom[-1]["score"]


def test_another_learning_rate_is_used_and_written_down(runs):
    assert [events[0]["learning_rate"] for events in (runs.plain, runs.slow)] == [None, 1e-6]
    losses = [[e["loss"] for e in events if e["event"] == "step"] for events in (runs.plain, runs.slow)]
    assert losses[0][0] == losses[1][0]  # the first is of the same weights
    assert losses[0][-1] < 0.9 * losses[1][-1]


@pytest.mark.parametrize("rate", ["0", "-1", "inf", "nan", "fast"])
def test_what_is_no_learning_rate_is_refused(rate, capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["train", "none", "--workload", "digits", "--out", str(tmp_path), f"--learning-rate={rate}"])
    assert f"'{rate}' is no learning rate. Write a number above 0, like 0.05." in capsys.readouterr().err


def test_a_method_with_momentum_takes_the_place_of_the_optimizers(runs):
    plain, ours = ([e["loss"] for e in found if e["event"] == "step"] for found in (runs.plain, runs.momentum))
    assert ours == pytest.approx(plain, rel=1e-4)


@pytest.mark.slow
def test_finished_runs_are_kept_and_half_ones_made_again(tmp_path):
    p = plan(tmp_path, "bf16")
    run(p)
    file = Path(p.configs()[0].file)
    before = file.read_bytes()
    run(p)
    assert file.read_bytes() == before, "a finished run was made again"
    file.write_text("\n".join(before.decode().splitlines()[:4]) + '\n{"event": "st')
    run(p)
    assert read_events(file)[-1]["event"] == "end"


def finished(p: Plan) -> None:
    """As if the plan's one run had been made: its record, and its end."""
    p.out.mkdir(exist_ok=True)
    (config,) = p.configs()
    shared = ("spec", "workload", "workers", "network", "bandwidth", "latency", "learning_rate")
    record = {key: getattr(config, key) for key in shared} | {"event": "start", "limit_seconds": p.seconds}
    record |= {"epochs": config.planned_epochs, "expression": Method(config.spec).expression, "steps": 12, "batch": 32}
    Path(config.file).write_text(json.dumps(record) + "\n" + json.dumps({"event": "end"}) + "\n")


def file_of(p: Plan) -> str:
    (config,) = p.configs()
    return config.file


@pytest.mark.parametrize("changes", [{"epochs": 3}, {"seconds": 5.0}, {"steps": 13}, {"workers": 3}, {"batch": 16}])
def test_a_run_of_another_length_is_another_run(tmp_path, changes):
    p = plan(tmp_path, "bf16", steps=None)
    finished(p)
    assert train(p, Console(quiet=True)) == 0, "it is there already"
    assert train(replace(p, epochs=12), Console(quiet=True)) == 0, "the workload's own number, in other words"
    assert file_of(replace(p, **changes)) != file_of(p)


def test_a_preset_with_another_meaning_is_another_run(tmp_path, monkeypatch):
    p = plan(tmp_path, "topk")
    before = file_of(p)
    changed = replace(PRESETS["topk"], spec="ErrorFeedback(AllGather(TopK(ratio=0.02)))")
    monkeypatch.setitem(PRESETS, "topk", changed)
    assert file_of(p) != before


@needs_namespaces
def test_kernel_counters_agree_with_our_account(tmp_path):
    specs = "none", "topk", "torch:bf16"
    runs = run_together(plan(tmp_path, *specs, network="netns", bandwidth="200Mbit", workers=3))
    plain, sparse, half = (events[-1] for events in runs)
    assert plain["sent"] == pytest.approx(plain["accounted"], rel=0.06)
    assert sparse["accounted"] < sparse["sent"] < 1.35 * sparse["accounted"] + 30_000  # small messages: more framing
    assert half["sent"] == pytest.approx(plain["sent"] / 2, rel=0.06)
    assert half["accounted"] is None


HAND = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from tersegrad.lab import workloads
torch.set_num_threads(1)
dist.init_process_group("gloo")
w = workloads.find("digits")
data = w.load(None)
model = DistributedDataParallel(w.model(0))
if sys.argv[1] == "fp16":
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = w.optimizer(model)
schedule = w.schedule(optimizer, 12)
done = 0
for epoch in range(2):
    for batch in w.batches(data, epoch, dist.get_rank(), 2, 0):
        if done == 12:
            break
        optimizer.zero_grad()
        loss, _ = w.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        done += 1
if dist.get_rank() == 0:
    print("score", w.evaluate(model.module, data), "loss", float(loss))
dist.destroy_process_group()
"""


def test_topk_in_torch_operations_trains_as_ours(tmp_path):
    """The same rule: the same losses and the same score, to the bit. DDP makes new buckets after the first step."""
    specs = "torch:topk(ratio=0.02)", "ErrorFeedback(AllGather(TopK(ratio=0.02)))", "torch:dgc(ratio=0.02)", "none"
    theirs, ours, sampled, plain = run_together(plan(tmp_path, *specs, steps=20))
    losses = [[e["loss"] for e in events if e["event"] == "step"] for events in (theirs, ours, sampled, plain)]
    assert losses[0] == losses[1]
    assert theirs[-1]["score"] == ours[-1]["score"]
    assert losses[0] != losses[3]
    assert losses[2][-1] < losses[2][0], "DGC's selection with error feedback learns"
    assert losses[2] != losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "by_hand"), [("none", "plain"), ("torch:fp16", "fp16")])
def test_the_lab_changes_nothing(tmp_path, spec, by_hand):
    """The same last loss and score, to the bit, as the same steps written out by hand."""
    events = run(plan(tmp_path, spec))[spec]
    script = tmp_path / "by_hand.py"
    script.write_text(HAND)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), by_hand]
    out = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert float(out[out.index("score") + 1]) == events[-1]["score"]
    assert float(out[out.index("loss") + 1]) == [e for e in events if e["event"] == "step"][-1]["loss"]


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(("signum", "kind"), [(signal.SIGINT, "netns"), (signal.SIGTERM, "throttled")])
def test_an_interrupted_run_leaves_nobody_behind(tmp_path, signum, kind):
    argv = [sys.executable, "-m", "tersegrad.cli", "train", "topk", "bf16", "--workload", "digits", "--workers", "2"]
    argv += ["--bandwidth", "50Mbit", "--network", kind, "--epochs", "1000", "--out", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_for_a_step(tmp_path, process)
        keepers = descendants(process.pid)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped. The same command goes on from here" in errors
    assert not [pid for pid in keepers if Path(f"/proc/{pid}").exists() and state_of(pid) != "Z"]


def wait_for_a_step(folder: Path, process: subprocess.Popen) -> None:
    """Until rank 0 has written a step: polls the file, and fails if the run ends first."""
    while True:
        assert process.poll() is None, "the run ended by itself"
        if any(e["event"] == "step" for f in folder.glob("*.jsonl") for e in read_events(f)):
            return
        os.sched_yield()


def descendants(pid: int) -> list[int]:
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [d for child in children for d in descendants(child)]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.slow
@needs_namespaces
def test_a_killed_rank_is_named_and_the_others_end(tmp_path):
    argv = [sys.executable, "-m", "tersegrad.cli", "train", "topk", "--workload", "digits", "--workers", "2"]
    argv += ["--bandwidth", "50Mbit", "--network", "netns", "--epochs", "1000", "--out", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_for_a_step(tmp_path, process)
        workers = [p for p in descendants(process.pid) if b"tersegrad.lab.worker" in command_of(p)]
        os.kill(max(workers), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "ended with exit code" in errors
    assert "the same command goes on from here" in errors


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk that is full at once")
def test_a_full_disk_is_told(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)], check=True)
    try:
        with pytest.raises(RunFailedError, match=r"(?s)torchrun ended with exit code 1.*No space left on device"):
            train(plan(tmp_path, "bf16", steps=60), Console(quiet=True))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["topk", "--workload", "mnist"], "There is no workload 'mnist'. Write one of: digits"),
        (["topkk", "--workload", "digits"], "'topkk' is unknown"),
        (["torch:lars", "--workload", "digits"], "none of torch's hooks that the lab knows"),
        (["torch:powersgd(rank=x)", "--workload", "digits"], "the lab knows"),
        (["torch:powersgd(rank=0.5)", "--workload", "digits"], "the lab knows"),
        (["torch:topk(ratio=1.5)", "--workload", "digits"], "'ratio=1.5' in"),
        (["topk", "--workload", "digits", "--bandwidth", "fast"], "is not a rate"),
        (["topk", "--workload", "digits", "--bandwidth", "1Mbit", "--network", "none"], "has no link to be slow"),
        (["torch:fp16", "--workload", "digits", "--bandwidth", "1Mbit", "--network", "throttled"], "talks past"),
    ],
)
def test_mistakes_are_told_before_anything_starts(tmp_path, capsys, args, says):
    assert main(["train", *args, "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_methods():
    assert Method("none").peer
    assert Method("torch:powersgd(rank=2)").torch_hook() == ("powersgd", {"rank": 2, "start": 10})
    assert Method("torch:topk").torch_hook() == ("topk", {"ratio": 0.01})
    assert Method("torch:dgc(ratio=.05)").torch_hook() == ("dgc", {"ratio": 0.05})
    assert Method("topk").expression == "ErrorFeedback(AllGather(TopK(ratio=0.01)))"
    assert not Method("topk").peer


def test_momentum_before_sending_takes_weight_decay_along():
    workload = workloads.find("cifar-resnet20")
    adapted = Method("MomentumCorrection(AllGather(TopK(0.01)), momentum=0.8)").adapt(workload)
    assert (adapted.momentum, adapted.weight_decay) == (0.0, pytest.approx(5 * workload.weight_decay))
    assert Method("topk").adapt(workload) == workload


def test_map_arithmetic(tmp_path):
    cells = [Cell("none", "1Gbit", 10.0), Cell("bf16", "1Gbit", 8.0), Cell("topk", "1Gbit", 12.0)]
    assert [row["ratio"] for row in with_ratios(cells)] == [1.25, 1.0, 1.5]
    file = tmp_path / "run.jsonl"
    steps = [{"event": "step", "step": s, "seconds": 0.1 * s + (5 if s > 2 else 0)} for s in range(1, 9)]
    file.write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert step_ms(file) == pytest.approx(100.0)


def test_a_map_needs_something_dense(tmp_path, capsys):
    assert main(["map", "topk", "--workload", "digits", "--out", str(tmp_path)]) == 2
    assert "a map needs a dense baseline" in capsys.readouterr().err


@needs_namespaces
def test_latency_is_the_kernels_where_it_can_delay_packets(tmp_path, monkeypatch):
    slow = plan(tmp_path, "torch:bf16", network="netns", bandwidth="100Mbit", latency="5ms")
    if networks.latency_supported():
        events = run(slow)["torch:bf16"]
        assert events[0]["kernel_latency"] is True
        assert step_ms(Path(slow.configs()[0].file)) > 10  # a ring of two needs two rounds of 5 ms
        return
    with pytest.raises(ValueError, match="cannot delay packets"):
        slow.configs()
    (emulated,) = replace(slow, specs=("topk",)).configs()
    assert emulated.link is not None
    # As on a kernel with netem: nothing is emulated, and the kernel is asked for the delay. This one says no.
    monkeypatch.setattr(networks, "latency_supported", lambda: True)
    (config,) = slow.configs()
    assert config.kernel_latency
    assert config.link is None
    with pytest.raises(RuntimeError, match=r"netem delay 5000us"), open_network(config):
        pass
