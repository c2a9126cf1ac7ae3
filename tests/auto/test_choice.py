"""Decisions out of agreed numbers."""

import math

import numpy as np
import pytest

from support.cases import cases
from tersegrad.auto.choice import (
    Measured,
    Trial,
    agree,
    combine,
    fastest,
    finalists,
    has_changed,
    method_for_bucket,
    winner,
)
from tersegrad.comm import threads


def trial(seconds, step=1.0, slack=0.0, left=0.0):
    return Trial(seconds, seconds, step, slack, left)


@cases(size=[1, 2, 4])
def test_all_workers_get_the_same_trial_and_it_is_that_of_all_numbers(size):
    rows = np.random.default_rng(size).exponential(size=(size, 7))
    trials = threads.run(size, lambda comm: agree(Measured(*rows[comm.rank]), comm))
    assert all(t == trials[0] for t in trials)
    until = (rows[:, 0] + rows[:, 1]).min()
    assert trials[0].seconds == pytest.approx(until + rows[:, 2].max())
    assert trials[0].wait == rows[:, 1].min()
    assert trials[0].step == pytest.approx(np.median(rows[:, 3]))
    assert trials[0].slack == rows[:, 4].min()
    assert trials[0].left == pytest.approx(rows[:, 6].sum() / rows[:, 5].sum())


def test_a_worker_that_measured_nothing_is_left_out():
    assert combine([Measured(), Measured(1.0, 2.0, 3.0, 4.0, 0.0, 2.0, 1.0)]).seconds == 6.0
    nothing = combine([Measured(), Measured()])
    assert (nothing.seconds, nothing.step, nothing.slack, nothing.left) == (math.inf, math.inf, 0.0, 0.0)


def test_who_is_early_and_waits_does_not_make_a_method_slow():
    early, late = Measured(0.001, 0.050, 0.001), Measured(0.001, 0.004, 0.001)
    assert combine([early, late]).seconds == pytest.approx(0.006)


def test_the_one_that_stands_first_is_kept_unless_another_is_clearly_faster():
    assert fastest({"a": 1.0, "b": 0.97}, 0.05) == "a"
    assert fastest({"a": 1.0, "b": 0.94}, 0.05) == "b"
    assert fastest({"a": math.inf, "b": math.inf}, 0.05) == "a"
    assert fastest({"a": math.inf, "b": 5.0}, 0.05) == "b"


def test_a_bucket_takes_the_fastest_within_budget_and_dense_where_that_is_hidden():
    trials = {"dense": trial(0.100), "bf16": trial(0.060, left=1e-6), "topk": trial(0.010, left=0.7)}
    assert method_for_bucket(trials, budget=1.0, margin=0.05) == "topk"
    assert method_for_bucket(trials, budget=0.5, margin=0.05) == "bf16"
    assert method_for_bucket(trials, budget=1e-9, margin=0.05) == "dense"
    hidden = {**trials, "dense": trial(0.100, slack=0.02)}
    assert method_for_bucket(hidden, budget=1.0, margin=0.05) == "dense"
    assert method_for_bucket({}, budget=1.0, margin=0.05) == "dense"


def test_finalists_are_the_two_best_and_mixed():
    trials = {"dense": trial(1, 1.0), "bf16": trial(1, 0.5), "topk": trial(1, 0.3), "powersgd": trial(1, 2.0)}
    assert finalists(trials, ["bf16", "topk", "powersgd"], 0.05) == ["mixed", "bf16", "topk"]
    assert finalists(trials, ["bf16", "powersgd"], 0.05) == ["dense", "mixed", "bf16"]
    assert finalists(trials, [], 0.05) == ["dense", "mixed"]
    assert finalists({}, [], 0.05) == ["mixed"]


def test_dense_is_a_finalist_where_others_are_hardly_faster():
    trials = {"dense": trial(1, 1.0), "bf16": trial(1, 0.98), "topk": trial(1, 0.97)}
    assert finalists(trials, ["bf16", "topk"], 0.05) == ["dense", "mixed", "bf16"]


def test_who_was_not_measured_is_tried_again():
    trials = {"dense": trial(1, 1.0), "bf16": trial(1, math.inf), "topk": trial(1, 0.1)}
    assert finalists(trials, ["bf16", "topk"], 0.05) == ["mixed", "bf16", "topk"]


def test_dense_is_left_out_only_where_it_is_hopeless():
    trials = {"dense": trial(1, 1.4), "bf16": trial(1, 1.1), "topk": trial(1, 1.0)}
    assert finalists(trials, ["bf16", "topk"], 0.05) == ["dense", "mixed", "bf16", "topk"]
    assert finalists({**trials, "dense": trial(1, 1.6)}, ["bf16", "topk"], 0.05) == ["mixed", "bf16", "topk"]


def test_the_winner_is_found_round_by_round():
    assert winner({"dense": [1.0, 9.0, 1.0], "topk": [0.8, 7.0, 0.8]}, 0.1) == "topk"
    assert winner({"dense": [1.0, 1.0, 1.0], "topk": [0.95, 0.2, 0.95]}, 0.1) == "dense"  # once is by chance
    assert winner({"dense": [math.inf] * 3, "topk": [1.0, 1.0, math.inf]}, 0.1) == "topk"
    assert winner({"dense": [math.inf] * 3, "topk": [math.inf] * 3}, 0.1) == "dense"
    assert winner({"dense": [1.0] * 3, "bf16": [0.85] * 3, "topk": [0.8] * 3}, 0.1) == "bf16"


@cases(
    "now before changed",
    [(0.03, 0.01, True), (0.01, 0.03, True), (0.014, 0.01, False), (0.00003, 0.00001, False), (0.01, 0.0, True)],
)
def test_has_changed(now, before, changed):
    assert has_changed(now, before, 1.5) is changed
