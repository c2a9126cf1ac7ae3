"""MomentumCorrection against ErrorFeedback, against torch's SGD, and against DGC's update written in plain torch."""

import io
import math

import pytest
import torch

from support.cases import cases
from tersegrad import parse
from tersegrad.comm import threads
from tersegrad.core import Layout, Step, contribution, reduce, state
from tersegrad.wrappers import MomentumCorrection

LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), ((20, 30), (30,), (7, 10)))
N = LAYOUT.numel


def gradient(rank, step):
    return torch.randn(N, generator=torch.Generator().manual_seed(1000 * step + rank))


def run(spec, size, steps, first=0, before=None, gradient=gradient, in_place=False):
    """Each worker's means, and its state at the end."""

    def work(comm):
        reducer, outs = parse(spec), []
        memory = reducer.init(LAYOUT, comm)
        if before is not None:
            state.merge(state.split(before[comm.rank], LAYOUT), memory, LAYOUT)
        for step in range(first, first + steps):
            x = gradient(comm.rank, step)
            out = x if in_place else torch.empty(N)
            reduce(reducer, Step(LAYOUT, step), x, out, memory, comm)
            assert in_place or not bool(x.any())
            (state.commit if bool(out.isfinite().all()) else state.roll_back)(memory)
            outs.append(out)
        return outs, memory

    return threads.run(size, work)


def assert_same(a, b):
    for ours, theirs in zip(a, b, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours[0], theirs[0], strict=True))


# ---- what it is -----------------------------------------------------------------------------------


@cases(options=["", ", nesterov=True", ", masking=False"])
@cases(inner=["AllGather(TopK(0.05))", "AllGather(QSGD(4))", "Ring(BF16())", "TwoShot(TopK(0.1))", "Dense()"])
def test_without_momentum_it_is_error_feedback_bit_for_bit(inner, options):
    ours = run(f"MomentumCorrection({inner}, momentum=0.0{options})", 3, 10)
    theirs = run(f"ErrorFeedback({inner})", 3, 10)
    assert_same(ours, theirs)
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.equal(a["residual"], b["residual"])


@cases(nesterov=[False, True])
def test_sent_whole_it_is_momentum_sgd(nesterov):
    """torch's optimizer with momentum on the mean gradient makes the steps that are sent here."""
    means = run(f"MomentumCorrection(Dense(), nesterov={nesterov}, masking=False)", 2, 20)[0][0]
    weights = torch.nn.Parameter(torch.zeros(N, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9, nesterov=nesterov)
    for step, mean in enumerate(means):
        before = weights.detach().clone()
        weights.grad = torch.stack([gradient(rank, step) for rank in (0, 1)]).double().mean(0)
        optimizer.step()
        torch.testing.assert_close(mean.double(), before - weights.detach(), rtol=1e-5, atol=1e-5)


def dgc(size, steps, ratio, momentum, nesterov, masking, clip):
    """Algorithms 1 and 2 of the paper in plain torch, clipped by tensor; returns the mean of every step."""
    u, v = torch.zeros(size, N), torch.zeros(size, N)
    means = []
    for step in range(steps):
        sent = torch.zeros(size, N)
        for w in range(size):
            g = gradient(w, step)
            if clip is not None:
                for part in g.split(LAYOUT.sizes):
                    part *= min(1.0, clip / math.sqrt(size) / float(part.norm()))
            u[w] = momentum * u[w] + g
            v[w] += g + momentum * u[w] if nesterov else u[w]
            mask = torch.zeros(N, dtype=torch.bool)
            mask[torch.topk(v[w].abs(), round(ratio * N)).indices] = True
            sent[w] = torch.where(mask, v[w], 0.0)
            v[w][mask] = 0.0
            if masking:
                u[w][mask] = 0.0
        means.append(sent.mean(0))
    return means


@cases(nesterov=[False, True])
@cases(masking=[False, True])
@cases(clip=[None, 3.0])
def test_it_is_dgc(nesterov, masking, clip):
    spec = f"MomentumCorrection(AllGather(TopK(0.05)), nesterov={nesterov}, masking={masking}, clip={clip})"
    ours = run(spec, 2, 20)[0][0]
    theirs = dgc(2, 20, 0.05, 0.9, nesterov, masking, clip)
    for mean, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mean, want, rtol=1e-4, atol=1e-5)


def test_masking_and_clipping_are_seen_by_the_test_above():
    plain, unmasked, clipped = (dgc(2, 20, 0.05, 0.9, False, *how) for how in [(True, None), (False, None), (True, 3)])
    assert not torch.allclose(plain[-1], unmasked[-1], atol=0.1)
    assert not torch.allclose(plain[-1], clipped[-1], atol=0.1)


# ---- where something was sent ---------------------------------------------------------------------


def test_in_place_changes_nothing():
    for options in ("", ", nesterov=True"):
        spec = f"MomentumCorrection(AllGather(TopK(0.05)){options})"
        assert_same(run(spec, 2, 6), run(spec, 2, 6, in_place=True))


def test_rounding_on_the_way_is_not_sending():
    """A ring of seven divides by seven and multiplies again, which is not exact: that must not end any velocity."""
    for _, memory in run("MomentumCorrection(Ring(TopK(0.01)))", 7, 1):
        assert float((memory["velocity"] != 0).float().mean()) > 0.95


def test_quantised_values_end_the_velocity_and_leave_their_error():
    _, memory = run("MomentumCorrection(AllGather(TopK(0.05, values=BF16())))", 1, 1)[0]
    sent = memory["velocity"] == 0
    assert int(sent.sum()) >= 0.04 * N  # some values are bfloat16 by chance, none of the others is sent
    x = gradient(0, 0)
    assert torch.equal(memory["residual"][sent], (x - x.bfloat16().float())[sent])


def test_what_is_sent_in_all_elements_ends_all_velocity():
    for _, memory in run("MomentumCorrection(Dense())", 2, 3):
        assert not bool(memory["velocity"].any())
    for _, memory in run("MomentumCorrection(Dense(), masking=False)", 2, 3):
        assert bool(memory["velocity"].all())


# ---- memory ---------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_leaves_no_trace():
    def poisoned(rank, step):
        x = gradient(rank, step)
        if step == 2 and rank == 1:
            x[5] = math.inf
        return x

    for options in ("", ", clip=1.0"):
        spec = f"MomentumCorrection(AllGather(TopK(0.05)){options})"
        skipped = run(spec, 2, 4, gradient=lambda rank, i: gradient(rank, (0, 1, 3, 4)[i]))
        with_nan = run(spec, 2, 5, gradient=poisoned)
        for (means, memory), (want, want_memory) in zip(with_nan, skipped, strict=True):
            assert not bool(means[2].isfinite().all())
            assert torch.equal(means[4], want[3])
            assert torch.equal(memory["velocity"], want_memory["velocity"])


WARM_UP = "'ratio', steps={0: 0.25, 2: 0.0625, 4: 0.015625}"


@cases(
    spec=[
        f"MomentumCorrection(Schedule(AllGather(PerTensor(SampledTopK(0.05))), {WARM_UP}))",
        f"Schedule(MomentumCorrection(AllGather(PerTensor(SampledTopK(0.05)))), {WARM_UP})",
        "Schedule(MomentumCorrection(AllGather(TopK(0.05))), 'momentum', steps={0: 0.0, 3: 0.9})",
    ]
)
def test_the_warm_up_goes_on_after_a_checkpoint(spec):
    whole = run(spec, 2, 7)
    half = run(spec, 2, 3)
    buffer = io.BytesIO()
    torch.save([state.copy(memory) for _, memory in half], buffer)
    buffer.seek(0)
    rest = run(spec, 2, 4, first=3, before=torch.load(buffer, weights_only=True))
    assert_same(whole, [(a[0] + b[0], None) for a, b in zip(half, rest, strict=True)])
    if "'ratio'" in spec:
        counts = [int((mean != 0).sum()) for mean in whole[0][0]]
        assert counts[0] > 2 * counts[2] > 4 * counts[4] > 0


@cases(masking=[False, True])
def test_a_residual_that_was_sent_masks_like_any_sending(masking):
    reducer = parse(f"MomentumCorrection(AllGather(TopK(0.05)), masking={masking})")
    _, memory = run(repr(reducer), 1, 4)[0]
    residual, velocity = memory["residual"].clone(), memory["velocity"].clone()
    assert residual.any()
    assert torch.equal(reducer.residual(LAYOUT, memory), residual)
    reducer.clear(LAYOUT, memory)
    assert torch.equal(memory["residual"], residual)  # until the step is committed
    state.commit(memory)
    assert not bool(memory["residual"].any())
    assert torch.equal(memory["velocity"], torch.zeros(N) if masking else velocity)


# ---- clipping -------------------------------------------------------------------------------------


@cases(size=[1, 4])
def test_each_tensor_is_clipped_to_its_share(size):
    """Alike on all workers, they add up: N workers with independent noise have a mean of norm clip / N."""
    spec = "MomentumCorrection(Dense(), momentum=0.0, clip=2.0)"
    mean = run(spec, size, 1, gradient=lambda rank, step: gradient(0, 0))[0][0][0]
    for part, whole in zip(mean.split(LAYOUT.sizes), gradient(0, 0).split(LAYOUT.sizes), strict=True):
        assert float(part.norm()) == pytest.approx(min(2.0 / math.sqrt(size), float(whole.norm())), rel=1e-5)
        assert float(torch.cosine_similarity(part, whole, dim=0)) == pytest.approx(1.0, abs=1e-5)


def test_below_the_limit_and_at_zero_nothing_is_clipped():
    for x in (gradient(0, 0), torch.zeros(N)):
        mean = run("MomentumCorrection(Dense(), clip=1e6)", 1, 1, gradient=lambda rank, step, x=x: x.clone())[0][0][0]
        assert torch.equal(mean, x)


def test_huge_gradients_are_clipped_and_not_zeroed():
    """Their squares do not fit in float32."""
    mean = run("MomentumCorrection(Dense(), clip=1.0)", 1, 1, gradient=lambda r, s: torch.full((N,), 1e38))[0][0][0]
    assert float(mean[:600].norm()) == pytest.approx(1.0, rel=1e-5)


# ---- what is refused ------------------------------------------------------------------------------


@cases(
    "spec message",
    [
        ("MomentumCorrection(ErrorFeedback(AllGather(TopK(0.1))))", "ErrorFeedback inside has a memory"),
        ("ErrorFeedback(MomentumCorrection(AllGather(TopK(0.1))))", "MomentumCorrection inside has a memory"),
        ("MomentumCorrection(MomentumCorrection(Dense()))", "MomentumCorrection inside has a memory"),
        ("MomentumCorrection(Schedule(ErrorFeedback(AllGather(TopK(0.1))), 'ratio', steps={0: 0.1}))", "memory"),
        ("MomentumCorrection(Dense(), momentum=1.0)", "from 0 to below 1"),
        ("MomentumCorrection(Dense(), momentum=True)", "from 0 to below 1"),
        ("MomentumCorrection(Dense(), clip=0.0)", "a norm above 0"),
        ("MomentumCorrection(Dense(), masking=1)", "True or False"),
    ],
)
def test_what_cannot_be_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


def test_a_compressor_is_no_reducer():
    with pytest.raises(TypeError, match=r"Write MomentumCorrection\(AllGather\(TopK"):
        parse("MomentumCorrection(TopK(0.1))")


def test_it_says_what_it_adds_to_the_account():
    """Velocity, and not the gradient; what is clipped away is not in it either."""
    x, velocity = gradient(0, 0), gradient(0, 1)
    clipped = torch.cat([p * min(1.0, 2.0 / math.sqrt(4) / float(p.norm())) for p in x.split(LAYOUT.sizes)])
    for options, want in (
        ({}, 0.9 * velocity + x),
        ({"momentum": 0.0}, x),
        ({"nesterov": True}, x + 0.9 * (0.9 * velocity + x)),
        ({"momentum": 0.0, "clip": 2.0}, clipped),
    ):
        reducer = MomentumCorrection(parse("Dense()"), **options)
        given = contribution(reducer, LAYOUT, {"velocity": velocity, "inner": {}}, x, 4)
        torch.testing.assert_close(given, want, rtol=1e-5, atol=1e-6)
        assert reducer.needs().no_momentum == (reducer.momentum > 0)
