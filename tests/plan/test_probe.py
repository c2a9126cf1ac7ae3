"""The probe: finds the link that a simulated network has, whatever the noise; and real processes agree on it."""

import dataclasses
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import plan_cases
from tersegrad.comm import threads
from tersegrad.comm.metered import Tap
from tersegrad.core import Layout
from tersegrad.plan import probe
from tersegrad.plan.codecs import BucketCost, Network
from tersegrad.plan.cost import Link
from tersegrad.plan.probe import Profile, fit
from tersegrad.plan.timeline import Compute

_clock = threading.local()


class _Wire(Tap):
    """10 MB/s and 2 ms a hop, with noise: now and then something takes much longer."""

    def __init__(self, inner, noise):
        super().__init__(inner)
        self.noise, self.chance = noise, np.random.default_rng(inner.rank)
        _clock.now = 0.0

    def observe(self, traffic, started, overlapped=0.0):
        mine = torch.tensor([started], dtype=torch.float64).view(torch.uint8)
        begun = max(float(there.view(torch.float64)) for there in self.inner.all_gather(mine))
        stuck = 0.3 if self.noise and traffic.sent > 100 and self.chance.random() < 0.05 else 0.0
        late = stuck + self.noise * self.chance.exponential()
        _clock.now = max(_clock.now, begun) + traffic.sent / 1e7 + 2e-3 * traffic.hops + late


@pytest.mark.parametrize(("workers", "noise"), [(2, 0.0), (4, 0.0), (2, 2e-4), (3, 2e-4)])
def test_the_links_bandwidth_and_latency_are_found(monkeypatch, workers, noise):
    monkeypatch.setattr(time, "perf_counter", lambda: getattr(_clock, "now", 0.0))
    networks = threads.run(workers, lambda comm: probe.measure_network(_Wire(comm, noise)))
    assert all(network == networks[0] for network in networks)
    found = networks[0].all_reduce
    assert found.bandwidth == pytest.approx(1e7, rel=0.05 if noise else 1e-6)
    assert found.latency == pytest.approx(2e-3, rel=0.3 if noise else 1e-6)
    straight = networks[0].messages
    assert straight.bandwidth == pytest.approx(1e7, rel=0.05 if noise else 1e-4)
    assert straight.latency + (workers - 1) * straight.overhead == pytest.approx(
        2e-3 * (workers - 1), rel=0.3 if noise else 0.02
    )  # this wire takes messages one after the other


def test_a_slow_link_is_not_sent_everything(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: getattr(_clock, "now", 0.0))
    sent = []

    class _Slow(_Wire):
        def observe(self, traffic, started, overlapped=0.0):
            sent.append(traffic.sent)
            _clock.now += traffic.sent / 1e3

    threads.run(2, lambda comm: probe.measure_network(_Slow(comm, 0.0)))
    assert max(sent) == 16_000  # the first size that takes longer than is worth waiting for


def test_one_worker_has_no_network():
    assert threads.run(1, probe.measure_network) == [Network.of(Link())]


@given(st.floats(1e4, 1e9), st.floats(1e-6, 1e-1), st.integers(0, 6), st.floats(0.01, 100))
def test_fit_ignores_a_point_that_is_far_off(bandwidth, latency, which, by):
    sizes = (0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
    points = [(size, 2, size / bandwidth + 2 * latency) for size in sizes]
    size, hops, seconds = points[which]
    points[which] = (size, hops, seconds + by)
    link = fit(points)
    assert link.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert link.latency == pytest.approx(latency, rel=1e-3, abs=1e-3 * sizes[3] / bandwidth)


def test_fit_of_nothing_to_speak_of():
    assert fit([]) == Link()
    assert fit([(100, 2, 0.5), (200, 2, 0.1)]).bandwidth == float("inf")


def example():
    return Profile(
        workers=4,
        network=Network(Link(1e8, 1e-4, busy=0.5), Link(float("inf"), 2e-4, 3e-5)),
        compute=Compute(0.1, 0.2, 0.01, (0.1, 0.2)),
        buckets=[Layout(("w", "b"), ((2, 3), (3,))), Layout.flat(7)],
        costs={"topk": [BucketCost(9, 1e-3, 2e-3, (("all_gather", 99),), 72), BucketCost(7, 0.0, 0.0, (), 0)]},
        contention=0.5,
        environment={"cores": 2},
    )


def test_a_profile_is_read_as_it_was_written(tmp_path):
    example().save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == example()


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 99}', "not json"])
def test_what_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(ValueError, match="not a profile"):
        Profile.load(tmp_path / "profile.json")


def test_real_processes_agree_on_the_network(gloo4):
    profiles = gloo4.run(plan_cases.profile)
    assert all(profile.network == profiles[0].network for profile in profiles)
    first = profiles[0]
    assert dataclasses.asdict(first.network)["all_reduce"]["latency"] > 0
    assert first.workers == 4
    assert set(first.costs) == {"none", "topk"}
    assert len(first.costs["topk"]) == len(first.buckets) == len(first.compute.ready)


@pytest.mark.parametrize(("cores", "workers", "share"), [(8, 4, 0.0), (6, 4, 0.5), (4, 4, 1.0), (2, 4, 1.0)])
def test_contention(cores, workers, share):
    assert probe.contention_of(cores, workers) == share
