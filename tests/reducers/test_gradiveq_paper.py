"""GradiVeQ(rule="paper") against an oracle in NumPy and float64, written from the paper's own formulas."""

import numpy as np
import pytest
import torch

from support.cases import cases
from tersegrad import specs
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.compressors import QSGD, Identity
from tersegrad.core import Layout, Step, reduce, state
from tersegrad.reducers import GradiVeQ, Ring
from tersegrad.reducers.gradiveq import pca, pipeline
from tersegrad.testing import runs

LAYOUT = Layout(
    ("stem.weight", "stem.bias", "body.weight", "head.weight", "point.weight"),
    ((8, 3, 3, 3), (8,), (12, 8, 3, 3), (10, 12), (6, 12, 1, 1)),
    seed=3,
)
CONVOLUTIONS = "stem.weight", "body.weight", "point.weight"
LEARN, COMPRESS = 8, 6
PAPER = GradiVeQ(warmup=1, learn=LEARN, compress=COMPRESS, loss=0.05, rule="paper")
COUNTS = {"stem.weight": 3, "body.weight": 3, "point.weight": 1}  # slices: rows of the kernel, or its only position


def gradient(rank, step):
    """Noise over a few slowly changing directions, so that d is neither 1 nor everything."""
    generator = np.random.default_rng(1000 * step + rank)
    common = np.random.default_rng(7).normal(size=(3, LAYOUT.numel))
    x = 0.3 * generator.normal(size=LAYOUT.numel) + generator.normal(size=3) @ common + 0.5 * common[0]
    return torch.from_numpy(x.astype(np.float32))


def in_paper_order(x, name):
    """(H, W, D, F), F fastest, in slices."""
    i = LAYOUT.names.index(name)
    f, d, h, w = LAYOUT.shapes[i]
    flat = np.asarray(x, np.float64)[LAYOUT.offsets[i] : LAYOUT.offsets[i + 1]].reshape(f, d, h, w)
    return flat.transpose(2, 3, 1, 0).reshape(COUNTS[name], -1)


class Compressor:
    """Section by section as in the paper: mean, K x K covariance, SVD, d by energy; sums over nodes, mu / N each."""

    def __init__(self, samples, energy_lost, s):
        self.s = s  # reuse factor
        self.mu = samples.mean(0)  # (slices, K), of sums over nodes
        self.bases = []
        for first in range(0, samples.shape[1], s):
            centred = samples[:, first] - self.mu[first]
            u, energy, _ = np.linalg.svd(centred.T @ centred)
            kept = np.cumsum(energy) / energy.sum()
            d = 1 + int(np.sum(kept < 1 - energy_lost))
            self.bases.append(u[:, :d])

    def basis(self, m):
        return self.bases[m // self.s]

    def compress(self, g, nodes):
        return [self.basis(m).T @ (g[m] - self.mu[m] / nodes) for m in range(len(g))]

    def decompress(self, c):
        return np.stack([self.basis(m) @ c[m] + self.mu[m] for m in range(len(c))])

    def local_loss(self, g, nodes):
        """Equation (7), over the energy of g."""
        c = self.compress(g, nodes)
        back = np.stack([self.basis(m) @ c[m] + self.mu[m] / nodes for m in range(len(g))])
        return ((g - back) ** 2).sum() / (g**2).sum()


def oracle(nodes, s, first, name):
    """The compressor of a layer that has learned in the steps from ``first`` on."""
    sums = [sum(in_paper_order(gradient(n, t), name) for n in range(nodes)) for t in range(first, first + LEARN)]
    return Compressor(np.stack(sums), PAPER.loss, s)


@cases(basis=["layer", "slice", 1, 2, 5])
@cases(size=[1, 2, 3, 6])
def test_means_are_those_of_the_paper(size, basis):
    reducer = GradiVeQ(warmup=1, learn=LEARN, compress=COMPRESS, loss=0.05, rule="paper", basis=basis)
    traces = runs.run(reducer, size, gradient, LAYOUT, 1 + LEARN + COMPRESS)
    for name in CONVOLUTIONS:
        s = {"layer": COUNTS[name], "slice": 1}.get(basis, basis)
        known = oracle(size, s, 1, name)
        memory = next(m for m in traces[0].state["layers"].values() if m["names"] == [name])
        for step in range(1 + LEARN, 1 + LEARN + COMPRESS):
            own = [in_paper_order(gradient(n, step), name) for n in range(size)]
            each = [known.compress(g, size) for g in own]
            total = [sum(parts) for parts in zip(*each, strict=True)]
            expected = known.decompress(total) / size
            got = in_paper_order(traces[0].means[step], name)
            assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()
        assert memory["phase"] == "learn", "L_c steps are over"
        assert memory["report"]["held_out_loss"] is None
        d = np.mean([known.basis(m).shape[1] for m in range(COUNTS[name])])
        assert memory["report"]["ratio"] == pytest.approx(got.shape[1] / d)
    for trace in traces:
        assert all(torch.equal(a, b) for a, b in zip(trace.means, traces[0].means, strict=True))


def test_only_convolutions_and_no_layer_is_too_small():
    assert [PAPER.slicing(shape) is not None for shape in LAYOUT.shapes] == [True, False, True, False, True]
    traces = runs.run(PAPER, 3, gradient, LAYOUT, 12)
    plain = runs.run(specs.parse("Dense()"), 3, gradient, LAYOUT, 12)
    for name in ("stem.bias", "head.weight"):
        i = LAYOUT.names.index(name)
        where = slice(LAYOUT.offsets[i], LAYOUT.offsets[i + 1])
        assert all(torch.equal(a[where], b[where]) for a, b in zip(traces[0].means, plain[0].means, strict=True))


@cases(size=[3, 4, 6])
def test_the_majority_ends_a_phase(size):
    """Each worker compares its own loss, equation (7), with the bound; more than half of them end the phase."""
    long = 30
    steps, known = range(9, 9 + long), {name: oracle(size, COUNTS[name], 1, name) for name in CONVOLUTIONS}
    losses = {
        name: np.array([[c.local_loss(in_paper_order(gradient(n, t), name), size) for n in range(size)] for t in steps])
        for name, c in known.items()
    }
    decisive = np.sort(losses["body.weight"], 1)[:, -(size // 2 + 1)]  # a majority loses more than any smaller bound
    bound = float(np.sort(decisive)[-3:-1].mean())
    reducer = GradiVeQ(warmup=1, learn=LEARN, compress=long, loss=0.05, rule="paper", vote=bound)
    seen = {}

    def note(state_):
        seen.setdefault(id(state_), []).append({m["names"][0]: m["phase"] for m in state_["layers"].values()})

    runs.run(reducer, size, gradient, LAYOUT, 9 + long, between=note)
    phases, *others = seen.values()
    assert all(other == phases for other in others)
    for name in CONVOLUTIONS:
        ends = [t for t in range(long) if 2 * (losses[name][t] > bound).sum() > size]
        lasted = next((t for t in range(long) if phases[9 + t][name] != "compress"), None)
        assert lasted == (ends[0] if ends else long - 1)
    assert 2 * (losses["body.weight"] > bound).sum(1).max() > size, "the majority has spoken"


def test_every_worker_fits_and_sends_a_digest_only(monkeypatch):
    calls = []
    real = pca.principal_axes
    monkeypatch.setattr(pca, "principal_axes", lambda rows, loss: calls.append(rows.shape) or real(rows, loss))

    def work(comm):
        metered, memory = Metered(comm), PAPER.init(LAYOUT, comm)
        for step in range(1 + LEARN):
            x = gradient(comm.rank, step)
            reduce(PAPER, Step(LAYOUT), x, x, memory, metered)
            state.commit(memory)
        return metered.by_collective

    for collectives in threads.run(3, work):
        assert set(collectives) == {"all_reduce", "all_gather"}
        assert collectives["all_gather"].payload == 16
    assert len(calls) == 3 * len(CONVOLUTIONS)
    assert {shape[:2] for shape in calls} == {(1, LEARN)}, "the first slice only, all samples"


def test_other_bits_on_one_worker_are_an_error_on_all(monkeypatch):
    real = pca.principal_axes
    monkeypatch.setattr(pca, "principal_axes", lambda rows, loss: -real(rows, loss) if odd.pop() else real(rows, loss))
    odd = [False] * 8 + [True]  # the sign of a basis is arbitrary: what another library may well do

    def work(comm):
        memory = PAPER.init(LAYOUT, comm)
        for step in range(LEARN):
            x = gradient(comm.rank, step)
            reduce(PAPER, Step(LAYOUT), x, x, memory, comm)
            state.commit(memory)
        with pytest.raises(RuntimeError, match=r"computed other bases than rank 0.*rule='ours'"):
            reduce(PAPER, Step(LAYOUT), x, x, memory, comm)
        return True

    assert threads.run(3, work) == [True] * 3


# ---- Algorithm 1 -----------------------------------------------------------------------------------


class Log:
    """Who encoded, sent and decoded which segment, in order."""

    def __init__(self, monkeypatch):
        self.events = {}
        fill, empty = pipeline.CodedSegment.fill, pipeline.CodedSegment.empty
        monkeypatch.setattr(pipeline.CodedSegment, "fill", lambda s: self.note("compress", s) or fill(s))
        monkeypatch.setattr(pipeline.CodedSegment, "empty", lambda s: self.note("decompress", s) or empty(s))

    def note(self, what, segment):
        number = int(segment.step.layout.names[0].split()[1])
        self.events.setdefault(id(segment.bucket), []).append((what, number))


@cases(size=[1, 2, 3, 6])
def test_segments_come_in_the_order_of_algorithm_1(monkeypatch, size):
    log, ranks = Log(monkeypatch), {}

    def work(comm):
        memory = PAPER.init(LAYOUT, comm)
        ranks[id(memory)] = comm.rank
        for step in range(2 + LEARN):
            x = gradient(comm.rank, step)
            reduce(PAPER, Step(LAYOUT), x, x, memory, comm)
            state.commit(memory)
        return memory

    kept = threads.run(size, work)
    assert len(kept) == size
    for memory, events in log.events.items():
        n = ranks[memory]
        assert events == [("compress", (n - i) % size) for i in range(size)] + [
            ("decompress", (n + 1 - i) % size) for i in range(size)
        ]


def test_a_segment_is_compressed_while_the_last_one_travels(monkeypatch):
    """Every compression but the first happens between the start of a message and the wait for it."""
    log = []
    fill, empty = pipeline.CodedSegment.fill, pipeline.CodedSegment.empty
    monkeypatch.setattr(pipeline.CodedSegment, "fill", lambda s: log.append((s.bucket["rank"], "code")) or fill(s))
    monkeypatch.setattr(pipeline.CodedSegment, "empty", lambda s: log.append((s.bucket["rank"], "code")) or empty(s))

    class Spy(Metered):
        def start_shift(self, x, into, by=1):
            log.append((self.rank, "start"))
            pending = super().start_shift(x, into, by)
            wait = pending.wait
            pending.wait = lambda: log.append((self.rank, "wait")) or wait()
            return pending

    def work(comm):
        memory = {**PAPER.init(LAYOUT, comm), "rank": comm.rank}
        for step in range(2 + LEARN):
            x = gradient(comm.rank, step)
            reduce(PAPER, Step(LAYOUT), x, x, memory, Spy(comm))
            state.commit(memory)

    threads.run(3, work)
    for rank in range(3):
        events = "".join(what[0] for who, what in log if who == rank)
        assert events == "cs" + "cws" + "cw" + "sc" + "wsc" + "wc"


@cases(count=[1, 2, 4, 7, 12])
def test_segments_are_whole_slices_of_nearly_equal_length(count):
    traces = runs.run(PAPER, 1, gradient, LAYOUT, 2 + LEARN)
    whole = torch.zeros(LAYOUT.numel)
    layers = [layer for layer in PAPER._layers(LAYOUT, whole, whole, traces[0].state) if layer.phase == "compress"]
    segments = pipeline.cut(layers, count)
    assert len(segments) == count
    seen = [(run.layer.place, run.first + i) for runs_ in segments for run in runs_ for i in range(run.subspace.count)]
    assert seen == [(layer.place, i) for layer in layers for i in range(layer.slicing.count)]
    sizes = [sum(run.subspace.size for run in runs_) for runs_ in segments]
    longest = max(run.subspace.size // run.subspace.count for layer in layers for run in layer.runs)
    assert max(sizes) - sum(sizes) / count <= longest


# ---- the preset ------------------------------------------------------------------------------------


def test_the_preset_has_the_published_figures():
    reducer = specs.parse_reducer("gradiveq-paper")
    assert (reducer.loss, reducer.learn, reducer.compress, reducer.warmup) == (0.01, 100, 400, 2500)
    assert (reducer.rule, reducer.basis, reducer.fitted) == ("paper", "layer", 100)
    assert reducer.learning == Ring(QSGD(bits=4))
    assert reducer.ring == Ring(Identity(), pieces=1)
    assert reducer.slicing((16, 16, 3, 3)).length == 768
