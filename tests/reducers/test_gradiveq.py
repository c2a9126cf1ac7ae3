"""GradiVeQ through its phases: learned, refused, compressed, drifted; alike on all workers, no trace of a NaN."""

import io
import math

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from support import simulate_cases
from support.cases import cases
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.compressors import BF16, QSGD, Identity, TopK
from tersegrad.core import Layout, Step, reduce, state, why_uncompressed
from tersegrad.reducers import AllGather, AllReduce, Dense, GradiVeQ, Ring, TwoShot
from tersegrad.reducers.gradiveq import fitting, pca
from tersegrad.reducers.gradiveq.slices import slicing
from tersegrad.testing import reducers, runs
from tersegrad.wrappers import ErrorFeedback


def allocations(events):
    """Bytes of every block that torch's allocator gave out, temporaries inside operators included."""
    for event in events:
        if event.typed[0] == _EventType.Allocation:
            yield event.typed[1].alloc_size
        yield from allocations(event.children)


LAYOUT = Layout(
    ("stem.weight", "stem.bias", "body.weight", "head.weight", "_tail.weight"),
    ((8, 6, 3, 3), (8,), (12, 8, 3, 3), (10, 12), (6, 10, 5)),
    seed=3,
)
CONVOLUTIONS = {"stem.weight": 3, "body.weight": 5, "_tail.weight": 2}  # name -> rank of its synthetic gradients
SHORT = {"warmup": 1, "learn": 6, "compress": 4, "tiny": 0, "loss": 1e-6}


def cut_of(name, reducer):
    return reducer.slicing(LAYOUT.shapes[LAYOUT.names.index(name)])


def low_rank(reducer, subspace=0, changes=(), from_step=0, ranks=None):
    """Gradients whose slices lie near a few directions around a mean; those in ``changes`` move to other directions."""

    def gradient(rank, step):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(LAYOUT.numel, generator=generator)
        for name, r in CONVOLUTIONS.items():
            cut, i = cut_of(name, reducer), LAYOUT.names.index(name)
            moved = name in changes and step >= from_step and (ranks is None or rank in ranks)
            fixed = torch.Generator().manual_seed(subspace + 77 * i + 5 * moved)
            directions = torch.randn(r, cut.length, generator=fixed)
            mean = torch.randn(cut.count, cut.length, generator=torch.Generator().manual_seed(i))
            slices = mean + torch.randn(cut.count, r, generator=generator) @ directions
            part = x[LAYOUT.offsets[i] : LAYOUT.offsets[i + 1]]
            cut.join(slices.reshape(-1), torch.zeros_like(slices), part)
        return x

    return gradient


def noise(rank, step):
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def memories(state_):
    return {memory["names"][0]: memory for memory in state_["layers"].values()}


def phases_of(reducer, size, gradient, steps, **kwargs):
    """For every worker the phases of all layers after each step; and the traces."""
    seen = {}

    def note(state_):
        seen.setdefault(id(state_), []).append({name: m["phase"] for name, m in memories(state_).items()})

    traces = runs.run(reducer, size, gradient, LAYOUT, steps, between=note, **kwargs)
    return [seen[id(trace.state)] for trace in traces], traces


# ---- what it does ----------------------------------------------------------------------------------


@cases(order=["position", "channel", "filter"])
@cases(size=[1, 3])
def test_low_rank_gradients_are_learned_and_then_exact(size, order):
    reducer = GradiVeQ(**SHORT, order=order)
    phases, traces = phases_of(reducer, size, low_rank(reducer), 12)
    expected = ["learn"] * 6 + ["compress"] * 4 + ["learn"] * 2  # after each step: the first one was the warm-up
    for name in CONVOLUTIONS:
        assert [p[name] for p in phases[0]] == expected
    for step in range(12):
        truth = runs.mean([t.gradients[step] for t in traces])
        runs.assert_close(traces[0].means[step], truth, 2e-4, f"mean of step {step}")
        for trace in traces:  # each worker's own gradient has gone, not only the mean of all
            runs.assert_close(trace.rests[step], torch.zeros(LAYOUT.numel), 2e-4, f"rest of step {step}")
    for name, rank in CONVOLUTIONS.items():
        report = memories(traces[0].state)[name]["report"]
        assert report["coefficients"] == rank
        assert report["ratio"] == cut_of(name, reducer).length / rank
        assert report["held_out_loss"] < 1e-6
        assert report["fit_seconds"] > 0
        assert (report["fits"], report["refusals"], report["drifts"]) == (1, 0, 0)


def test_noise_is_refused_and_tried_again_later_and_later():
    reducer = GradiVeQ(warmup=0, learn=10, compress=3, tiny=0)
    phases, traces = phases_of(reducer, 2, noise, 50)
    for name in CONVOLUTIONS:
        got = "".join(p[name][0] for p in phases[0])
        assert got == "l" * 9 + "r" * 3 + "l" * 10 + "r" * 6 + "l" * 10 + "r" * 12
        report = memories(traces[0].state)[name]["report"]
        assert report["refusals"] == 3
        assert report["held_out_loss"] > 0.5 or report["ratio"] < 2
    for step in range(50):  # refused is dense, and dense is exact
        runs.assert_close(traces[0].means[step], runs.mean([t.gradients[step] for t in traces]), 1e-6, "mean")


def test_without_a_judge_noise_goes_compressed_and_is_lost():
    reducer = GradiVeQ(warmup=0, learn=10, compress=5, worst=None, tiny=0)
    _, traces = phases_of(reducer, 1, noise, 12)
    lost = (traces[0].means[11] - traces[0].gradients[11])[: LAYOUT.sizes[0]].square().sum()
    assert lost > 0.5 * traces[0].gradients[11][: LAYOUT.sizes[0]].square().sum()


def test_a_layer_without_gradient_is_refused_and_nothing_of_it_is_lost_later():
    reducer = GradiVeQ(warmup=0, learn=3, compress=9, worst=None, tiny=0)

    def gradient(rank, step):
        x = noise(rank, step)
        if step < 4:
            x[: LAYOUT.sizes[0]] = 0.0
        return x

    phases, traces = phases_of(reducer, 2, gradient, 6)
    assert phases[0][5]["stem.weight"] == "refused"
    n = LAYOUT.sizes[0]
    runs.assert_close(traces[0].means[5][:n], runs.mean([t.gradients[5][:n] for t in traces]), 1e-6, "mean")


@cases(scale=[1e-30, 1e33])
def test_gradients_whose_squares_are_no_floats(scale):
    reducer = GradiVeQ(**SHORT)
    clean = low_rank(reducer)
    traces = runs.run(reducer, 2, lambda rank, step: clean(rank, step) * scale, LAYOUT, 10)
    for step in range(10):
        truth = runs.mean([t.gradients[step] for t in traces])
        runs.assert_close(traces[0].means[step] / scale, truth / scale, 1e-3, f"mean of step {step}")


def test_bases_are_orthonormal_and_the_same_bits_on_all_workers():
    reducer = GradiVeQ(**SHORT)
    _, traces = phases_of(reducer, 3, low_rank(reducer), 8)
    for name in CONVOLUTIONS:
        fits = [memories(t.state)[name]["fit"] for t in traces]
        basis = fits[0]["basis"][0]
        assert torch.allclose(basis.T @ basis, torch.eye(basis.shape[1]), atol=1e-5)
        for fit in fits[1:]:
            assert all(torch.equal(fit[key], fits[0][key]) for key in ("basis", "mean", "offset"))


def test_only_rank_0_fits(monkeypatch):
    calls = []
    real = pca.principal_axes
    monkeypatch.setattr(pca, "principal_axes", lambda rows, loss: calls.append(1) or real(rows, loss))
    reducer = GradiVeQ(**SHORT)
    phases_of(reducer, 4, low_rank(reducer), 7)
    assert len(calls) == len(CONVOLUTIONS)


def test_a_basis_for_each_slice():
    reducer = GradiVeQ(warmup=0, learn=30, compress=4, basis="slice", tiny=0, loss=1e-6)
    _, traces = phases_of(reducer, 2, low_rank(reducer), 33)
    fit = memories(traces[0].state)["body.weight"]["fit"]
    assert fit["basis"].shape == (cut_of("body.weight", reducer).count, cut_of("body.weight", reducer).length, 5)
    runs.assert_close(traces[0].means[32], runs.mean([t.gradients[32] for t in traces]), 2e-4, "mean")


def test_everything_else_is_bit_identical_to_a_plain_all_reduce():
    reducer = GradiVeQ(**SHORT)
    gradient = low_rank(reducer)
    ours, plain = (runs.run(r, 3, gradient, LAYOUT, 12) for r in (reducer, Dense()))
    for step in range(12):
        for name in ("stem.bias", "head.weight"):
            i = LAYOUT.names.index(name)
            where = slice(LAYOUT.offsets[i], LAYOUT.offsets[i + 1])
            assert torch.equal(ours[0].means[step][where], plain[0].means[step][where])


def test_message_is_the_coefficients_and_what_is_dense():
    reducer = GradiVeQ(**SHORT, drift=None)
    gradient = low_rank(reducer)

    def work(comm):
        metered, memory, sent = Metered(comm), reducer.init(LAYOUT, comm), []
        for step in range(12):
            before = metered.total.payload
            x = gradient(comm.rank, step)
            reduce(reducer, Step(LAYOUT), x, x, memory, metered)
            state.commit(memory)
            sent.append(metered.total.payload - before)
        return sent, metered.by_collective

    dense = sum(n for n, name in zip(LAYOUT.sizes, LAYOUT.names, strict=True) if name not in CONVOLUTIONS)
    coded = sum(cut_of(name, reducer).count * rank for name, rank in CONVOLUTIONS.items())
    for sent, collectives in threads.run(2, work)[1:]:  # rank 0 hands over the bases as well
        assert sent == [4 * LAYOUT.numel] * 7 + [4 * (dense + coded)] * 4 + [4 * LAYOUT.numel]
        assert collectives["all_reduce"].calls == 12  # one a step
        assert collectives["broadcast"].calls == 2


def test_one_number_more_for_every_look():
    assert GradiVeQ().drift is not None
    reducer = GradiVeQ(**SHORT)
    gradient = low_rank(reducer)

    def work(comm):
        metered, memory = Metered(comm), reducer.init(LAYOUT, comm)
        for step in range(8):
            before = metered.total.payload
            x = gradient(comm.rank, step)
            reduce(reducer, Step(LAYOUT), x, x, memory, metered)
            state.commit(memory)
        return metered.total.payload - before

    dense = 8 + 120
    coded = sum(cut_of(name, reducer).count * rank for name, rank in CONVOLUTIONS.items())
    assert threads.run(1, work) == [4 * (dense + coded + len(CONVOLUTIONS))]


# ---- phases ----------------------------------------------------------------------------------------


@cases(ranks=[None, [2]])
def test_gradients_that_leave_the_basis_are_learned_anew_on_the_same_step_everywhere(ranks):
    reducer = GradiVeQ(warmup=0, learn=8, compress=40, tiny=0, loss=1e-4)
    gradient = low_rank(reducer, changes=["body.weight"], from_step=12, ranks=ranks)
    phases, traces = phases_of(reducer, 3, gradient, 24)
    assert phases[0] == phases[1] == phases[2]
    body = [p["body.weight"] for p in phases[0]]
    assert body == ["learn"] * 7 + ["compress"] * 5 + ["learn"] * 8 + ["compress"] * 4
    assert {p["stem.weight"] for p in phases[0][8:]} == {"compress"}, "only the layer that drifted learns"
    assert memories(traces[0].state)["body.weight"]["report"]["drifts"] == 1
    runs.assert_close(traces[0].means[23], runs.mean([t.gradients[23] for t in traces]), 1e-2, "after the refit")


def test_without_drift_nobody_looks():
    reducer = GradiVeQ(warmup=0, learn=5, compress=40, tiny=0, drift=None)
    gradient = low_rank(reducer, changes=["body.weight"], from_step=12)
    phases, _ = phases_of(reducer, 2, gradient, 24)
    assert {p["body.weight"] for p in phases[0][5:]} == {"compress"}


def test_noise_of_the_workers_themselves_is_no_drift():
    """Local gradients are mostly noise that cancels in the mean: that loss is there from the first look on."""
    reducer = GradiVeQ(warmup=0, learn=20, compress=60, tiny=0, loss=0.05, worst=None)
    smooth = low_rank(reducer)

    def gradient(rank, step):
        return smooth(0, step) + noise(rank, step) * (3.0 if rank else -3.0)

    phases, traces = phases_of(reducer, 2, gradient, 79)
    assert {tuple(p.values()) for p in phases[0][20:]} == {("compress",) * 3}
    assert memories(traces[0].state)["body.weight"]["local_loss"]["first"] > 0.3


@cases(options=[{}, {"worst": None}, {"learning": AllReduce(BF16())}, {"learning": AllGather(Identity())}])
@cases(bad=[math.nan, math.inf])
@cases(when=[0, 3, 6, 7, 8, 10, 11])  # 6: the last sample, after which the bases are fitted
def test_a_step_with_a_nan_leaves_no_trace_in_any_phase(when, bad, options):
    reducer = GradiVeQ(**SHORT, **options)
    clean = low_rank(reducer)

    def poisoned(rank, step):
        if step == when:
            x = clean(rank, 99)
            if rank == 1:
                x[LAYOUT.offsets[2] + 3] = bad
            return x
        return clean(rank, step - (step > when))

    expected, got = (runs.run(reducer, 2, g, LAYOUT, n) for g, n in ((clean, 13), (poisoned, 14)))
    for whole, other in zip(expected, got, strict=True):
        assert not bool(other.means.pop(when).isfinite().all())
        assert all(torch.equal(a, b) for a, b in zip(whole.means, other.means, strict=True))


def saved_and_loaded(states):
    buffer = io.BytesIO()
    torch.save([state.copy(s) for s in states], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@cases(learning=[Dense(), TwoShot(QSGD(bits=8))])
@cases(when=[1, 3, 6, 7, 8, 10, 11])
def test_a_checkpoint_in_any_phase_goes_on_as_if_nothing_had_happened(when, learning):
    reducer = GradiVeQ(**{**SHORT, "loss": 0.01}, learning=learning)
    gradient = low_rank(reducer)
    whole, _ = phases_of(reducer, 2, gradient, 13)
    means = runs.run(reducer, 2, gradient, LAYOUT, 13)[0].means
    half = runs.run(reducer, 2, gradient, LAYOUT, when)
    phases, resumed = phases_of(
        reducer, 2, gradient, 13 - when, first=when, states_before=saved_and_loaded([t.state for t in half])
    )
    assert phases[0] == phases[1] == whole[0][when:]
    for mean, again in zip(means[when:], resumed[0].means, strict=True):
        assert torch.equal(mean, again)


@cases(when=[0, 3, 7, 9, 11])
def test_other_buckets_do_not_change_the_result(when):
    """DDP cuts its buckets anew: every layer stays in its phase, wherever it goes."""
    reducer = GradiVeQ(**SHORT)
    gradient = low_rank(reducer)
    whole = runs.run(reducer, 2, gradient, LAYOUT, 13)[0].means
    half = runs.run(reducer, 2, gradient, LAYOUT, when)
    members = [[4, 1], [3, 0, 2]]
    parts = [LAYOUT.subset(m) for m in members]

    def work(comm):
        pieces, means = state.split(half[comm.rank].state, LAYOUT), []
        memories_ = []
        for part in parts:
            memories_.append(reducer.init(part, comm))
            state.merge(pieces, memories_[-1], part)
        for step in range(when, 13):
            x = gradient(comm.rank, step).split(LAYOUT.sizes)
            outs = list(x)
            for part, m, memory in zip(parts, members, memories_, strict=True):
                packed = torch.cat([x[i] for i in m])
                reduce(reducer, Step(part), packed, packed, memory, comm)
                state.commit(memory)
                for i, piece in zip(m, packed.split(part.sizes), strict=True):
                    outs[i] = piece
            means.append(torch.cat(outs))
        return means

    for means in threads.run(2, work):
        for expected, got in zip(whole[when:], means, strict=True):
            runs.assert_close(got, expected, 1e-4, "mean")


def test_one_large_fit_in_a_step(monkeypatch):
    monkeypatch.setattr(fitting, "LARGEST_PROBLEM", 10)
    reducer = GradiVeQ(**{**SHORT, "compress": 9})
    phases, traces = phases_of(reducer, 2, low_rank(reducer), 12)
    assert phases[0] == phases[1]
    starts = sorted(next(i for i, p in enumerate(phases[0]) if p[name] == "compress") for name in CONVOLUTIONS)
    assert starts == [6, 7, 8]
    for step in range(12):
        runs.assert_close(traces[0].means[step], runs.mean([t.gradients[step] for t in traces]), 2e-4, "mean")


# ---- other ways to travel --------------------------------------------------------------------------

WAYS = {
    "quantised while learning": {"learning": TwoShot(QSGD(bits=8))},
    "gathered while learning": {"learning": AllGather(QSGD(bits=8))},
    "quantised coefficients": {"coefficients": TwoShot(QSGD(bits=8))},
    "gathered coefficients": {"coefficients": AllGather(QSGD(bits=8))},
    "half coefficients": {"coefficients": AllReduce(BF16())},
    "sparse coefficients": {"coefficients": AllGather(TopK(0.5))},
    "pipelined ring": {"coefficients": Ring(Identity()), "order": "filter"},
    "pipelined ring in one piece": {"coefficients": Ring(Identity(), pieces=1), "basis": "slice"},
    "pipelined ring of halves": {"coefficients": Ring(BF16())},
    "ring of finished coefficients": {"coefficients": Ring(QSGD(bits=8))},
    "both": {"learning": TwoShot(QSGD(bits=4)), "coefficients": TwoShot(QSGD(bits=8))},
}


@cases(way=WAYS)
@cases(size=[1, 2, 3])
def test_the_law_holds_however_parts_travel(way, size):
    """Over several cycles, with layers in different phases: d changes, and with it the number of coefficients."""
    reducer = GradiVeQ(
        slice_size=4096, warmup=0, learn=4, compress=5, worst=None, tiny=0, **{"order": "position", **WAYS[way]}
    )
    gradient = low_rank(reducer, changes=["body.weight"], from_step=6)
    phases, traces = phases_of(reducer, size, gradient, 20)
    assert len({tuple(p.values()) for p in phases[0]}) > 2, "layers are in different phases"
    atol = reducers.tolerance(reducer, 4 * runs.largest(traces), size)
    for step in range(20):
        left = runs.mean([t.gradients[step] - t.rests[step] for t in traces])
        runs.assert_close(traces[0].means[step], left, atol, f"conservation at step {step}")
        assert all(torch.equal(t.means[step], traces[0].means[step]) for t in traces)


@cases(way=WAYS)
def test_a_checkpoint_while_layers_are_in_different_phases(way):
    reducer = GradiVeQ(
        slice_size=4096, warmup=0, learn=4, compress=5, worst=None, tiny=0, **{"order": "position", **WAYS[way]}
    )
    gradient = low_rank(reducer, changes=["body.weight"], from_step=6)
    whole = runs.run(reducer, 2, gradient, LAYOUT, 12)[0].means
    half = runs.run(reducer, 2, gradient, LAYOUT, 9)
    names = half[0].state.get("learning", {"names": ["body.weight"]})["names"]
    assert names == ["body.weight"], "only one of three learns"
    loaded = saved_and_loaded([t.state for t in half])
    resumed = runs.run(reducer, 2, gradient, LAYOUT, 3, first=9, states_before=loaded)
    for mean, again in zip(whole[9:], resumed[0].means, strict=True):
        runs.assert_close(again, mean, 1e-5, "mean")


def test_quantised_coefficients_are_fewer_bytes():
    def sent(coefficients):
        reducer = GradiVeQ(**SHORT, worst=None, drift=None, coefficients=coefficients)
        bucket = Layout(("w",), ((64, 256, 3, 3),))
        generator = torch.Generator().manual_seed(0)
        cut = reducer.slicing(bucket.shapes[0])
        directions = torch.randn(400, cut.length, generator=generator)

        def work(comm):
            metered, memory = Metered(comm), reducer.init(bucket, comm)
            own = torch.Generator().manual_seed(comm.rank)
            for _ in range(9):
                slices = torch.randn(cut.count, 400, generator=own) @ directions
                x, before = torch.empty(bucket.numel), metered.total.sent
                cut.join(slices.view(-1), torch.zeros(bucket.numel), x)
                reduce(reducer, Step(bucket), x, x, memory, metered)
                state.commit(memory)
            assert memory["layers"]["layer w"]["phase"] == "compress"
            return metered.total.sent - before

        return threads.run(4, work)[1]

    assert sent(TwoShot(QSGD(bits=8))) < 0.35 * sent(Dense())


@cases(size=[1, 3])
def test_with_error_feedback_nothing_is_lost_over_cycles(size):
    reducer = ErrorFeedback(GradiVeQ(warmup=1, learn=3, compress=4, loss=0.3, worst=None, tiny=0))
    traces = runs.run(reducer, size, noise, LAYOUT, 18)
    sent = torch.stack(traces[0].means).double().sum(0)
    late = runs.mean([t.held[-1] for t in traces])
    total = runs.mean([torch.stack(t.gradients).double().sum(0) for t in traces])
    runs.assert_close(sent + late, total, 1e-4, "telescoping sum")
    assert max(float(h.abs().max()) for h in traces[0].held) > 0.1


# ---- memory ----------------------------------------------------------------------------------------


def test_samples_are_bounded():
    reducer = GradiVeQ(warmup=0, learn=10, samples=50_000)
    bucket = Layout(("w",), ((128, 128, 3, 3),))

    def work(comm):
        memory = reducer.init(bucket, comm)
        for step in range(9):
            x = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(step))
            reduce(reducer, Step(bucket), x, x, memory, comm)
            state.commit(memory)
        return memory["layers"]["layer w"]["samples"]

    samples = threads.run(1, work)[0]
    kept = [value for key, value in samples.items() if key.startswith("sample")]
    assert len(kept) == 9
    assert sum(s.numel() for s in kept) <= 50_000 * 10 / reducer.fitted
    assert samples["total"].numel() == bucket.numel


def test_the_first_slice_alone_is_the_papers_rule():
    long = slicing((256, 256, 3, 3), 4096)
    assert fitting._sampled(GradiVeQ(samples=1), long).tolist() == [0]
    spread = fitting._sampled(GradiVeQ(), long)
    assert spread[0] == 0
    assert spread.unique().numel() == spread.numel() == 1024 // 80
    assert spread[-1] > 0.8 * 144
    shorter = GradiVeQ(slice_size=4096).slicing((256, 256, 3, 3))
    assert shorter.length == 2304
    assert fitting._sampled(GradiVeQ(), shorter).numel() == 1024 // 80, "a larger eigenvalue problem takes seconds"


def test_compressed_steps_allocate_nothing_of_gradient_size():
    bucket = Layout(("w", "b", "v"), ((64, 256, 3, 3), (64,), (256, 320, 3, 3)))
    reducer = GradiVeQ(slice_size=1024, warmup=0, learn=3, compress=9, tiny=0)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(4, 1024, generator=generator)

    def work(comm):
        memory = reducer.init(bucket, comm)
        x = torch.zeros(bucket.numel)

        def gradient():
            for shape, part in zip(bucket.shapes, x.split(bucket.sizes), strict=True):
                if len(shape) == 4:
                    cut = reducer.slicing(shape)
                    slices = torch.randn(cut.count, 4, generator=generator) @ directions[:, : cut.length]
                    cut.join(slices.view(-1), torch.zeros(part.numel()), part)

        def step():
            reduce(reducer, Step(bucket), x, x, memory, comm)
            state.commit(memory)

        for _ in range(5):
            gradient()
            step()
        assert {m["phase"] for m in memory["layers"].values()} == {"compress"}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        return max(allocations(profiler.profiler.kineto_results.experimental_event_tree()))

    assert threads.run(1, work)[0] < 0.05 * 4 * bucket.numel


# ---- what is refused -------------------------------------------------------------------------------


@cases(
    "arguments said",
    [
        ({"slice_size": 0}, "from 1 on"),
        ({"learn": 2}, "from 3 on"),
        ({"learn": 1, "worst": None}, "from 2 on"),
        ({"compress": 0}, "from 1 on"),
        ({"warmup": -1}, "from 0 on"),
        ({"samples": 1.5}, "whole number"),
        ({"tiny": -1}, "from 0 on"),
        ({"loss": 1.0}, "at least 0 and below 1"),
        ({"basis": "slices"}, "'layer' or 'slice'"),
        ({"basis": 0, "rule": "paper"}, "a number of slices"),
        ({"basis": 3}, "Write rule='paper' too"),
        ({"rule": "papers"}, "'ours' or 'paper'"),
        ({"vote": 0.0}, "above 0.0, or None"),
        ({"order": "filters"}, "'filter' or 'channel' or 'position'"),
        ({"worst": 0.0}, "above 0.0"),
        ({"drift": 1.0}, "above 1.0, or None"),
        ({"learning": ErrorFeedback(Dense())}, r"Write ErrorFeedback\(GradiVeQ"),
        ({"coefficients": ErrorFeedback(Dense())}, r"Write ErrorFeedback\(GradiVeQ"),
        ({"learning": GradiVeQ()}, "memory"),
    ],
)
def test_bad_parameters(arguments, said):
    with pytest.raises(ValueError, match=said):
        GradiVeQ(**arguments)


def test_a_compressor_is_not_a_reducer():
    with pytest.raises(TypeError, match=r"learning must be a reducer.*Write e.g. learning=TwoShot"):
        GradiVeQ(learning=BF16())


# ---- what it will not compress ---------------------------------------------------------------------


@cases(
    "reducer shapes said",
    [
        (GradiVeQ(), [(64, 32, 3, 3), (64,)], None),
        (GradiVeQ(), [(64, 128), (64,)], "Write linear=True"),
        (GradiVeQ(linear=True), [(64, 128), (64,)], None),
        (GradiVeQ(linear=True), [(5000, 128)], "more rows than slice_size=1024"),
        (GradiVeQ(), [(4, 4, 3, 3)], "too small"),
        (GradiVeQ(rule="paper"), [(64, 128)], "Write rule='ours', linear=True"),
        (ErrorFeedback(GradiVeQ()), [(64, 128)], "Write linear=True"),
        (ErrorFeedback(Dense()), [(64, 128)], None),
    ],
)
def test_it_says_why_it_would_compress_nothing(reducer, shapes, said):
    why = why_uncompressed(reducer, shapes)
    assert why is None if said is None else said in why


def test_attaching_to_a_model_without_convolutions_warns():
    with pytest.warns(UserWarning, match="compresses no parameter of this model: .* Write linear=True") as said:
        simulation = simulate_cases.virtual("GradiVeQ(warmup=0, learn=3, compress=9)", 2, 1)
    simulation.close()
    assert len(said) == 1
