"""What is advised, in settings whose answer is known."""

from dataclasses import replace

import pytest

from tersegrad.plan import advice
from tersegrad.plan.advice import Setting
from tersegrad.plan.codecs import BucketCost, Network
from tersegrad.plan.cost import Link, vgc_break_even
from tersegrad.plan.timeline import Compute

NBYTES = 1_000_000
COSTS = {
    "none": [BucketCost(250_000, 0.0, 0.0, (("all_reduce", NBYTES),), 0)] * 2,
    "bf16": [BucketCost(250_000, 0.002, 0.0, (("all_reduce", NBYTES // 2),), NBYTES)] * 2,
    "topk": [BucketCost(250_000, 0.010, 0.001, (("all_gather", NBYTES // 80),), 2 * NBYTES)] * 2,
}


def setting(bandwidth, workers=4, backward=0.1):
    return Setting(workers, Network.of(Link(bandwidth, 1e-4)), Compute(0.05, backward, 0.0, (backward / 2, backward)))


def test_on_a_fast_link_nothing_is_compressed():
    ranked = advice.rank(COSTS, setting(1e9))
    assert ranked[0].spec == "none"
    assert advice.answer(ranked).startswith("Do not compress: plain float32 already hides behind backward")


def test_where_half_precision_is_enough():
    ranked = advice.rank({k: COSTS[k] for k in ("none", "bf16")}, setting(2e7))
    assert "dense bf16" in advice.answer(ranked)
    assert advice.answer(ranked).startswith("Do not compress")


def test_on_a_slow_link_the_fastest_is_named_with_its_price():
    ranked = advice.rank(COSTS, setting(1e6))
    text = advice.answer(ranked)
    assert text.startswith("Compress with topk")
    assert "with bf16" in text
    assert "with none" in text
    assert [p.spec for p in ranked] == ["topk", "bf16", "none"]


def test_a_prediction_is_the_timeline_by_hand():
    plain = advice.predict("none", COSTS["none"], setting(1e7))
    each = 1_500_000 / 1e7 + 6e-4  # of the first 50 ms before backward ends hide
    assert plain.step == pytest.approx(0.05 + 0.05 + 2 * each)
    assert plain.exposed == pytest.approx(plain.step - 0.15)
    assert plain.sent == 3_000_000
    assert plain.wait == pytest.approx(2 * each)


def test_a_step_ahead_is_added_to_the_step_whatever_hides():
    costs = [replace(cost, ahead=0.004) for cost in COSTS["topk"]]
    ahead, without = (advice.predict("topk", each, setting(1e7)) for each in (costs, COSTS["topk"]))
    assert ahead.step == pytest.approx(without.step + 0.008)
    assert ahead.exposed == pytest.approx(without.exposed + 0.008)


def test_an_all_gather_loses_where_vgc_says():
    def steps(workers):
        there = Setting(workers, Network.of(Link(1e6)), Compute(0.0, 0.0, 0.0, (0.0, 0.0)))
        free = {"none": COSTS["none"], "gather": [BucketCost(1, 0.0, 0.0, (("all_gather", NBYTES // 8),), 0)] * 2}
        return {p.spec: p.step for p in advice.rank(free, there)}

    for workers in (8, 16, 32):  # straight to all is p/(p-1) faster than the paper's ring
        gain = steps(workers)["none"] / steps(workers)["gather"]
        assert gain == pytest.approx(8 / vgc_break_even(workers) * workers / (workers - 1))


def test_curves_and_who_leads_where():
    workers = (2, 8, 32, 128)
    steps = advice.curves(COSTS, setting(2e6), workers)
    assert steps["topk"] == sorted(steps["topk"])
    spans = advice.best_by_workers(steps, workers)
    assert spans[0][2] == "topk"
    assert spans[-1][2] == "bf16"
    assert (spans[0][0], spans[-1][1]) == (2, 128)


def test_the_table_names_all():
    text = advice.show(advice.rank(COSTS, setting(1e6)))
    assert text.splitlines()[0].split()[:4] == ["spec", "step", "compute", "exposed"]
    assert len(text.splitlines()) == 4
