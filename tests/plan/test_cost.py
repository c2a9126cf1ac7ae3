"""Closed forms: against values computed by hand, the papers' tables, and the bytes that real exchanges send."""

import math

import pytest
import torch

from tersegrad import parse
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.comm.throttled import Throttled
from tersegrad.core import HEADER_NBYTES, Layout, Step, reduce
from tersegrad.plan import cost
from tersegrad.plan.cost import Link

LINK = Link(bandwidth=1e6, latency=0.01)  # a megabyte a second, ten milliseconds a hop


@pytest.mark.parametrize(
    ("seconds", "by_hand"),
    [
        (cost.ring_all_reduce(4, 1_000_000, LINK), 1.5 + 0.06),
        (cost.ring_all_reduce(2, 1_000_000, LINK), 1.0 + 0.02),
        (cost.ring_all_reduce(1, 1_000_000, LINK), 0.0),
        (cost.naive_all_gather([800, 200_000, 80, 8], LINK), 0.6 + 0.03),
        (cost.pipelined_all_gather([100_000, 200_001], 100_000, LINK), 0.4 + 0.04),
        (cost.direct_all_gather(4, 100_000, LINK), 0.3 + 0.01),
        (cost.two_shot(4, 400_064, LINK), 0.6 + 6 * 64e-6 + 0.02),
        (cost.compressed_ring(4, 400_064, LINK), 0.6 + 6 * 64e-6 + 0.06),
        (cost.direct_all_gather(4, 100_000, Link(1e6, 0.01, overhead=0.001)), 0.3 + 0.01 + 0.003),
        (cost.two_shot(5, 64, Link(math.inf, 0.01, overhead=0.001)), 0.02 + 0.008),
    ],
)
def test_by_hand(seconds, by_hand):
    assert seconds == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(("workers", "ratio"), [(4, 2.67), (8, 4.57), (16, 8.53), (32, 16.5), (64, 32.5)])
def test_vgc_break_even(workers, ratio):
    assert float(f"{cost.vgc_break_even(workers):.3g}") == ratio
    assert cost.vgc_gain(workers, cost.vgc_break_even(workers)) == pytest.approx(1.0)


def test_vgc_resnet_50_on_sixteen_workers_and_one_gigabit():
    assert cost.ring_all_reduce(16, 4 * 25_560_000, Link(1e9 / 8)) == pytest.approx(1.53, abs=0.005)


def test_vgc_is_the_special_case_without_latency_and_with_small_blocks():
    workers, ratio, nbytes, link = 16, 40, 4_000_000, Link(1e8)
    dense = cost.ring_all_reduce(workers, nbytes, link)
    gathered = cost.pipelined_all_gather([nbytes // ratio] * workers, 1, link)
    assert dense / gathered == pytest.approx(cost.vgc_gain(workers, ratio), rel=1e-6)
    bound = (workers * nbytes / ratio + workers * 4096) / link.bandwidth
    assert gathered <= cost.pipelined_all_gather([nbytes // ratio] * workers, 4096, link) <= bound


RATES = {"change": 600e9, "fft": 71e9}


@pytest.mark.parametrize(
    ("gigabits", "fast", "slow"),
    [
        (8, 1.16, 1.31),
        (16, 1.38, 1.91),
        (24, 1.71, 3.50),
        (32, 2.23, 20.9),
        (40, 3.23, math.inf),
        (48, 5.82, math.inf),
        (56, 29.5, math.inf),
    ],
)
def test_fft_least_ratio_is_the_papers_table(gigabits, fast, slow):
    network = gigabits / 8 * 1e9
    assert cost.fft_least_ratio(network, packing=67e9, selection=30e9, **RATES) == pytest.approx(fast, rel=0.004)
    assert cost.fft_least_ratio(network, packing=12e9, selection=67e9, **RATES) == pytest.approx(slow, rel=0.004)


def test_fft_least_ratio_is_where_both_ways_take_the_same_time():
    network, nbytes = 1e9, 1e8
    k = cost.fft_least_ratio(network, packing=67e9, selection=30e9, **RATES)
    coding = 2 * nbytes * (4 / 600e9 + 1 / 71e9 + 1 / 67e9 + 1 / 30e9)
    assert coding + nbytes / k / network == pytest.approx(nbytes / network)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    "text", ["AllReduce(BF16())", "AllGather(TopK(0.01))", "TwoShot(BF16())", "Ring(BF16(), pieces=1)"]
)
def test_bytes_are_those_that_real_exchanges_send(text, workers):
    spec, numel = parse(text), 24_000

    def work(comm):
        metered = Metered(comm)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
        layout = Layout.flat(numel)
        reduce(spec, Step(layout), x, x, spec.init(layout, metered), metered)
        return metered.total

    total = threads.run(workers, work)[0]
    if "AllReduce" in text:
        expected = cost.load("all_reduce", workers, 2 * numel)
    elif "AllGather" in text:
        expected = cost.load("all_gather", workers, total.payload // (workers - 1))
    else:
        expected = cost.load("two_shot" if "TwoShot" in text else "ring", workers, 2 * numel + HEADER_NBYTES)
    assert total.sent == expected.sent
    assert expected.messages in (0, total.calls)


def test_a_link_is_that_of_throttled():
    assert Link(1e6, 0.01).seconds(500_000, 3) == Throttled("8Mbit", latency="10ms").seconds(500_000, 3)


def test_unknown_exchange():
    with pytest.raises(ValueError, match="all_gather, two_shot"):
        cost.load("carrier pigeon", 4, 100)
