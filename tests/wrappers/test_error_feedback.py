"""ErrorFeedback: what is not sent now is added to the next gradient; nothing is lost, only late."""

import math

import pytest
import torch

from support.cases import cases
from tersegrad import BF16, AllGather, AllReduce, Dense, ErrorFeedback, TopK, parse
from tersegrad.comm import threads
from tersegrad.core import Layout, Step, reduce, state
from tersegrad.testing import runs

LAYOUT = Layout(("w", "b"), ((20, 40), (200,)))
N = LAYOUT.numel
SENDERS = ["AllGather(TopK(0.02))", "AllGather(ScaledSign())", "Ring(FP16())", "TwoShot(QSGD())", "PowerSGD(rank=1)"]


def gradient(rank, step):
    return torch.randn(N, generator=torch.Generator().manual_seed(1000 * step + rank))


def top(x, k):
    kept = torch.zeros_like(x)
    where = torch.topk(x.abs(), k).indices
    kept[where] = x[where]
    return kept


@cases(size=[1, 2, 3])
def test_the_algorithm_in_plain_torch(size):
    """total = residual + gradient; the k largest go out; the rest is the next residual, bit for bit."""
    traces = runs.run(ErrorFeedback(AllGather(TopK(0.05))), size, gradient, LAYOUT, steps=8)
    residuals = [torch.zeros(N) for _ in range(size)]
    for step in range(8):
        sent = []
        for rank in range(size):
            total = residuals[rank] + gradient(rank, step)
            sent.append(top(total, 50))
            residuals[rank] = total - sent[-1]
        for rank, trace in enumerate(traces):
            torch.testing.assert_close(trace.means[step], torch.stack(sent).mean(0), rtol=1e-6, atol=1e-7)
            assert torch.equal(trace.held[step], residuals[rank])
            assert not bool(trace.rests[step].any()), "all of the gradient is sent or remembered"


@cases(size=[1, 4])
def test_each_tensor_is_clipped_before_it_is_remembered(size):
    """As if the clipped gradients had been given to the same method without clipping, bit for bit."""

    def clipped(rank, step):
        parts = gradient(rank, step).split(LAYOUT.sizes)
        return torch.cat([p * (5.0 / math.sqrt(size) / math.sqrt(float(p.double().square().sum()))) for p in parts])

    with_clip = runs.run(parse("ErrorFeedback(AllGather(TopK(0.05)), clip=5.0)"), size, gradient, LAYOUT, steps=6)
    by_hand = runs.run(ErrorFeedback(AllGather(TopK(0.05))), size, clipped, LAYOUT, steps=6)
    for a, b in zip(with_clip, by_hand, strict=True):
        for mine, theirs in zip([*a.means, *a.held], [*b.means, *b.held], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_clip_above_all_norms_changes_no_bit():
    specs = ErrorFeedback(AllGather(TopK(0.05)), clip=1e6), ErrorFeedback(AllGather(TopK(0.05)))
    a, b = (runs.run(spec, 2, gradient, LAYOUT, steps=4)[0] for spec in specs)
    assert all(torch.equal(x, y) for x, y in zip(a.means, b.means, strict=True))


@pytest.mark.parametrize("clip", ["0", "-1.0", "'much'", "True"])
def test_a_clip_is_a_norm(clip):
    with pytest.raises(ValueError, match=r"ErrorFeedback\(clip=.*: a norm above 0"):
        parse(f"ErrorFeedback(AllGather(TopK(0.05)), clip={clip})")


@cases(spec=SENDERS)
def test_sum_of_means_and_mean_residual_are_the_sum_of_gradients(spec):
    size, steps = 3, 10
    traces = runs.run(ErrorFeedback(parse(spec)), size, gradient, LAYOUT, steps)
    gradients = sum(gradient(rank, step).double() for rank in range(size) for step in range(steps)) / size
    means = sum(mean.double() for mean in traces[0].means)
    residual = sum(trace.held[-1].double() for trace in traces) / size
    assert float((means + residual - gradients).abs().max()) < 1e-4
    assert bool(residual.any())


def test_what_is_sent_whole_leaves_no_residual():
    plain = runs.run(Dense(), 2, gradient, LAYOUT, steps=3)
    for a, b in zip(runs.run(ErrorFeedback(Dense()), 2, gradient, LAYOUT, steps=3), plain, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.means, b.means, strict=True))
        assert not bool(a.held[-1].any())


def test_a_small_element_is_sent_when_it_has_added_up():
    x = torch.tensor([1.0, 0.3, 0.0, 0.0])
    (trace,) = runs.run(ErrorFeedback(AllGather(TopK(0.25))), 1, lambda rank, step: x.clone(), Layout.flat(4), steps=5)
    assert [mean.tolist()[:2] for mean in trace.means[:4]] == [[1.0, 0.0]] * 3 + [[0.0, pytest.approx(1.2)]]
    assert trace.means[4].tolist()[0] == 2.0


def test_the_residual_is_staged_and_changes_only_with_a_commit():
    reducer = ErrorFeedback(AllGather(TopK(0.05)))

    def work(comm):
        memory, means = reducer.init(LAYOUT, comm), []
        for end in (state.roll_back, state.roll_back, state.commit):
            x, out = gradient(comm.rank, 0), torch.empty(N)
            reduce(reducer, Step(LAYOUT), x, out, memory, comm)
            assert not bool(reducer.residual(LAYOUT, memory).any())
            end(memory)
            means.append(out)
        return means, reducer.residual(LAYOUT, memory)

    for rank, (means, residual) in enumerate(threads.run(2, work)):
        assert torch.equal(means[0], means[1])
        assert torch.equal(means[0], means[2])
        assert torch.equal(residual, gradient(rank, 0) - top(gradient(rank, 0), 50))


def test_two_buffers_are_swapped_and_no_third_is_made():
    reducer = ErrorFeedback(AllGather(TopK(0.05)))

    def work(comm):
        memory, seen = reducer.init(LAYOUT, comm), set()
        for step in range(6):
            x = gradient(comm.rank, step)
            reduce(reducer, Step(LAYOUT, step), x, x, memory, comm)
            state.commit(memory)
            seen.add(memory["residual"].data_ptr())
        return len(seen)

    assert threads.run(2, work) == [2, 2]


@cases(bad=[math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_the_residual_alone(bad):
    def spoilt(rank, step):
        x = gradient(rank, step)
        x[7] = bad if (rank, step) == (1, 1) else x[7]
        return x

    for trace in runs.run(ErrorFeedback(AllReduce(BF16())), 2, spoilt, LAYOUT, steps=3):
        assert not bool(trace.means[1].isfinite().all())
        assert torch.equal(trace.held[1], trace.held[0])
        assert bool(trace.means[2].isfinite().all())


def test_clear_stages_zeros():
    reducer, memory = ErrorFeedback(Dense()), {"residual": torch.ones(N), "inner": {}}
    reducer.clear(LAYOUT, memory)
    assert bool(reducer.residual(LAYOUT, memory).all())
    state.commit(memory)
    assert not bool(reducer.residual(LAYOUT, memory).any())


def test_a_second_memory_is_refused():
    with pytest.raises(ValueError, match="a gradient remembered twice is applied twice"):
        ErrorFeedback(ErrorFeedback(Dense()))
    with pytest.raises(TypeError, match=r"Write ErrorFeedback\(AllGather\(TopK\(ratio=0\.1\)\)\)"):
        ErrorFeedback(TopK(0.1))
