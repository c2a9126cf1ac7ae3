"""Auto over a simulated network and clock: nothing here depends on how fast this machine is."""

import io
import logging
import math
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from support.cases import cases
from tersegrad import parse
from tersegrad.auto import Auto
from tersegrad.comm import threads
from tersegrad.comm.metered import Tap
from tersegrad.core import Layout, Step, reduce
from tersegrad.core import state as states

_clock = threading.local()
SPEC = "Auto({'bf16': AllReduce(BF16()), 'topk': AllGather(TopK(0.01))}, warmup=2, trial=4, window=5)"
FINALS = 2 + 4 * 3  # the step they begin in: warm-up, then dense, bf16 and topk
PLANNED = FINALS + 5 * 4 * 3  # steps until the choice: five rounds of three finalists
FAST, SLOW = 1e9, 1e5  # bytes a second


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch):
    """Every thread has its own clock, which only the simulation moves."""
    monkeypatch.setattr(time, "perf_counter", lambda: getattr(_clock, "now", 0.0))


class _Wire(Tap):
    """A link of changing bandwidth: a collective begins when the last worker is there."""

    bandwidth = FAST

    def observe(self, traffic, started, overlapped=0.0):
        mine = torch.tensor([started], dtype=torch.float64).view(torch.uint8)
        begun = max(float(there.view(torch.float64)) for there in self.inner.all_gather(mine))
        _clock.now = max(_clock.now, begun + traffic.sent / self.bandwidth + 1e-4 * traffic.hops)


@dataclass
class _Run:
    """A worker that trains: a few buckets that become ready one after the other."""

    spec: Auto
    comm: threads.ThreadComm
    buckets: list[Layout]
    ready: list[float]
    noise: float = 0.0
    sent: list[torch.Tensor] = field(default_factory=list)
    given: list[torch.Tensor] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    step: int = 0

    def __post_init__(self):
        self.wire = _Wire(self.comm)
        self.chance = np.random.default_rng([5, self.comm.rank])
        self.states = [self.spec.init(bucket, self.wire) for bucket in self.buckets]
        _clock.now = 0.0

    def steps(self, count, poison=()):
        for _ in range(count):
            self._step(poisoned=self.step in poison)
        return self

    def _step(self, poisoned):
        begun, outs, xs = _clock.now, [], []
        for place, (bucket, ready, state) in enumerate(zip(self.buckets, self.ready, self.states, strict=True)):
            slow = 1.0 + self.noise * self.chance.exponential()
            _clock.now = max(_clock.now, begun + ready * slow)
            rng = np.random.default_rng([self.comm.rank, self.step, place])
            x = torch.from_numpy(rng.standard_normal(bucket.numel).astype(np.float32))
            if poisoned and self.comm.rank == 1:
                x[3] = math.nan
            xs.append(x.clone())
            reduce(self.spec, Step(bucket, self.step), x, x, state, self.wire)
            outs.append(x)
        kept = all(bool(out.isfinite().all()) for out in outs)
        for state in self.states:
            (states.commit if kept else states.roll_back)(state)
        if kept:
            self.sent.append(torch.cat(outs))
            self.given.append(torch.cat(xs))
        self.plans.append(self.states[0]["plan"])
        self.step += 1


def buckets(count=3, numel=2000):
    return [Layout((f"w{i}",), ((numel // 50, 50),), seed=1) for i in range(count)]


def train(work, size=2, spec=SPEC, ready=(0.01, 0.02, 0.03), noise=0.0, numel=2000):
    """``work(run)`` on every worker; returns its results."""
    return threads.run(size, lambda comm: work(_Run(parse(spec), comm, buckets(len(ready), numel), list(ready), noise)))


def on(bandwidth):
    """Trains over such a link until the choice is made."""

    def work(run):
        run.wire.bandwidth = bandwidth
        return run.steps(PLANNED + 1)

    return work


def finals(run):
    """The step of every finalist, in the first round."""
    state = run.states[0]
    return {name: state["finals"][str(place)] for place, name in enumerate(state["finalists"])}


def test_dense_is_kept_on_a_fast_network_and_left_on_a_slow_one():
    fast, slow = train(on(FAST))[0], train(on(SLOW))[0]
    assert fast.plans[-1] == "dense"
    assert all(state["late"] is False for state in fast.states)
    assert slow.plans[-1] != "dense"
    assert [state["pick"] for state in slow.states] == ["topk"] * 3
    assert finals(slow)["mixed"] < 0.2 * slow.states[0]["trials"]["dense"]["step"]


def test_the_programme_begins_dense_and_tries_all_in_turn():
    run = train(on(SLOW))[0]
    assert run.plans[: PLANNED - 1] == ["dense"] * (PLANNED - 1)  # nothing is chosen before all were tried
    assert list(run.states[0]["trials"]) == ["dense", "bf16", "topk"]
    assert run.states[0]["finalists"] == ["mixed", "bf16", "topk"]
    assert len(run.states[0]["finals"]) == 15
    fast = train(on(FAST))[0]
    assert fast.states[0]["finalists"][:2] == ["dense", "mixed"]


def test_the_choice_is_the_best_fixed_candidate_or_near_it():
    for bandwidth in (1e5, 3e5, 1e6, 3e6, 1e7, 1e9):
        run = train(lambda run, bandwidth=bandwidth: on(bandwidth)(run).steps(20))[0]  # there may be a fourth finalist
        steps = {name: trial["step"] for name, trial in run.states[0]["trials"].items()} | finals(run)
        assert steps[run.plans[-1]] <= min(steps.values()) / (1 - run.spec.margin)


@cases(size=[2, 3, 4])
def test_workers_agree_whatever_each_of_them_measures(size):
    def work(run):
        run.wire.bandwidth = 3e6  # where dense and compressed are near each other
        run.steps(PLANNED + 20)
        return [
            [state[key] for key in ("plan", "pick", "position", "trials", "finals", "usual", "strikes", "late")]
            for state in run.states
        ]

    decided = train(work, size, noise=0.5)
    assert all(other == decided[0] for other in decided[1:])


def test_a_bucket_that_hides_behind_backward_stays_dense():
    def work(run):
        run.wire.bandwidth = 3e5  # a dense bucket takes 27 ms, and backward another 100 after the second of them
        return run.steps(PLANNED + 20)  # there is a fourth finalist

    run = train(work, ready=(0.01, 0.02, 0.12))[0]
    assert [state["pick"] for state in run.states] == ["dense", "dense", "topk"]
    assert run.plans[-1] == "mixed"


def test_a_change_of_bandwidth_is_planned_for_once_and_not_twice(caplog):
    caplog.set_level(logging.INFO, "tersegrad")

    def work(run):
        run.wire.bandwidth = FAST
        run.steps(PLANNED + 15)
        before = run.plans[-1]
        run.wire.bandwidth = SLOW
        run.steps(150)
        return before, run.plans[-1]

    assert set(train(work, noise=0.1)) == {("dense", "mixed")}
    lines = [record.getMessage() for record in caplog.records]
    assert [("tried again" in line, "from here on" in line) for line in lines] == [
        (False, True),
        (True, False),
        (False, True),
    ]  # one line a decision, by one worker
    assert "waiting for others takes" in lines[1]


def test_a_network_that_becomes_fast_is_noticed_by_a_method_that_sends_little():
    def work(run):
        run.wire.bandwidth = SLOW
        run.steps(PLANNED + 15)
        run.wire.bandwidth = FAST
        return run.steps(90)

    run = train(work)[0]
    assert run.plans[-1] == "dense"
    assert not any(bool(state["residual"].any()) for state in run.states)  # what was not sent has gone out
    assert not any(state["late"] for state in run.states)


def test_noise_is_no_change(caplog):
    caplog.set_level(logging.INFO, "tersegrad")
    train(lambda run: run.steps(200), noise=0.3)
    assert len(caplog.records) == 1


def test_a_single_slow_window_is_no_change(caplog):
    caplog.set_level(logging.INFO, "tersegrad")

    def work(run):
        run.wire.bandwidth = 1e7
        run.steps(PLANNED + 1 + 10)  # the first window is what is usual
        run.wire.bandwidth = 1e5
        run.steps(5)
        run.wire.bandwidth = 1e7
        run.steps(60)

    train(work)
    assert len(caplog.records) == 1


def test_a_change_that_cannot_make_dense_worse_is_none(caplog):
    caplog.set_level(logging.INFO, "tersegrad")

    def work(run):
        run.wire.bandwidth = 2e6  # 4 ms a bucket; 30 ms of backward
        run.steps(PLANNED + 30)
        assert run.plans[-1] == "dense"
        run.wire.bandwidth = 1e9
        run.steps(30)
        run.ready = [0.1, 0.2, 0.3]
        run.steps(30)

    train(work, spec=SPEC.replace("window=5", "window=5, margin=0.3"))
    assert len(caplog.records) == 1


def test_a_shorter_step_is_a_change(caplog):
    caplog.set_level(logging.INFO, "tersegrad")

    def work(run):
        run.wire.bandwidth = 2e6
        run.ready = [0.2, 0.4, 0.6]
        run.steps(PLANNED + 20)
        before = run.plans[-1]
        run.ready = [0.001, 0.002, 0.003]
        return before, run.steps(120).plans[-1]

    before, after = train(work)[0]
    assert (before, after) != (after, before)
    assert before == "dense"
    assert "a step takes" in caplog.records[1].getMessage()


def test_what_is_left_behind_beyond_the_budget_is_refused():
    spec = SPEC.replace("window=5", "window=5, budget=0.1")  # top 1 % of a Gaussian holds less than 90 % of its energy
    run = train(on(SLOW), spec=spec)[0]
    assert run.states[0]["trials"]["topk"]["left"] > 0.5
    assert run.states[0]["trials"]["bf16"]["left"] < 1e-4
    assert [state["pick"] for state in run.states] == ["bf16"] * 3


def test_nothing_is_lost_through_changes_of_method():
    def work(run):
        run.wire.bandwidth = SLOW
        run.steps(PLANNED + 15)
        run.wire.bandwidth = FAST
        run.steps(80)
        return run

    spec = SPEC.replace("'bf16': AllReduce(BF16()), ", "").replace("TopK(0.01)", "TopK(0.05)")
    runs = train(work, spec=spec)
    assert len(set(runs[0].plans)) > 1
    late = torch.stack([torch.cat([s["residual"] for s in run.states]) for run in runs]).double().mean(0)
    given = torch.stack([torch.stack(run.given).double().sum(0) for run in runs]).mean(0)
    sent = torch.stack(runs[0].sent).double().sum(0)
    assert torch.allclose(sent + late, given, atol=1e-4)
    for mine, theirs in zip(runs[0].sent, runs[1].sent, strict=True):
        assert torch.equal(mine, theirs)


def test_a_step_that_is_undone_does_not_count():
    ends = [2 + 4 * i - 1 for i in range(1, 13)]  # of trials and finals: where numbers are exchanged
    begins = [FINALS]
    steps = [step + lost for lost, step in enumerate(sorted(ends + begins))]

    def work(run):
        run.wire.bandwidth = SLOW
        return run.steps(PLANNED + 1 + len(steps), poison=set(steps))

    runs = train(work)
    assert runs[0].states[0]["position"] == PLANNED + 1  # the others were undone
    assert runs[0].plans[-1] != "dense"
    assert [state["pick"] for state in runs[0].states] == ["topk"] * 3
    assert all(math.isfinite(trial["seconds"]) for trial in runs[0].states[0]["trials"].values())


@cases(before=[3, 9, FINALS, FINALS + 6, PLANNED, PLANNED + 13])
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_happened(before):
    def whole(run):
        run.wire.bandwidth = SLOW
        return run.steps(before + 8)

    def first(run):
        run.wire.bandwidth = SLOW
        run.steps(before)
        file = io.BytesIO()
        torch.save([states.copy(state) for state in run.states], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    saved = train(first)

    def second(run):
        run.wire.bandwidth = SLOW
        run.step = before
        for bucket, mine, fresh in zip(run.buckets, saved[run.comm.rank], run.states, strict=True):
            states.merge(states.split(mine, bucket), fresh, bucket)
        return run.steps(8)

    went_on, uninterrupted = train(second)[0], train(whole)[0]
    assert went_on.plans == uninterrupted.plans[before:]
    assert went_on.states[0]["position"] == uninterrupted.states[0]["position"]
    for mine, theirs in zip(went_on.sent, uninterrupted.sent[before:], strict=True):
        assert torch.equal(mine, theirs)


def test_a_residual_that_was_sent_is_cleared_and_dense_is_plain_again():
    def work(run):
        run.wire.bandwidth = SLOW
        run.steps(PLANNED + 2)
        state, bucket = run.states[0], run.buckets[0]
        held = run.spec.residual(bucket, state)
        before = torch.equal(held, state["residual"]), bool(held.any())
        run.spec.clear(bucket, state)
        states.commit(state)
        return *before, run.spec.residual(bucket, state), bool(state["residual"].any()), state["late"]

    assert train(work)[0] == (True, True, None, False, False)


def test_buffers_of_methods_that_lost_are_given_back():
    run = train(on(SLOW))[0]
    methods = run.states[0]["methods"]
    assert [key for key in methods["method bf16"] if key.startswith("_")] == []
    assert [key for key in methods["method topk"] if key.startswith("_")] != []
    fast = train(lambda run: run.steps(PLANNED + 2))[0]
    assert fast.plans[-1] == "dense"
    assert "_back_residual" not in fast.states[0]


@cases(
    "text said",
    [
        ("Auto({})", "nothing to choose from"),
        ("Auto({'dense': AllReduce(BF16())})", "is not a candidate"),
        ("Auto({'_x': AllReduce(BF16())})", "is not a candidate"),
        ("Auto({'topk': TopK(0.1)})", "is not a candidate"),
        ("Auto({'topk': ErrorFeedback(AllGather(TopK(0.1)))})", "memory of its own"),
        ("Auto(budget=0)", "fraction"),
        ("Auto(margin=1.0)", "margin"),
        ("Auto(change=1.0)", "factor above 1"),
        ("Auto(trial=2)", "at least 3"),
        ("Auto(window=0)", "at least 1"),
        ("ErrorFeedback(Auto())", "memory of its own"),
    ],
)
def test_what_cannot_work_is_refused(text, said):
    with pytest.raises((ValueError, TypeError), match=said):
        parse(text)
