"""RandomK: which positions, what is sent of them, and that workers who share a seed can add their payloads."""

import random

import numpy as np
import pytest
import torch

from support.cases import cases
from tersegrad import parse, roundtrip
from tersegrad.comm import threads
from tersegrad.comm.frame import FrameError
from tersegrad.compressors import RandomK
from tersegrad.core import Layout, Payload, Step, accumulate, mix_seed, reduce, state
from tersegrad.engine.roundtrip import decode

N = 1000
LAYOUT = Layout.flat(N, seed=5)


def gradient(rank, step):
    return torch.randn(N, generator=torch.Generator().manual_seed(1000 * step + rank)) + 3.0  # nowhere zero


def means(spec, size, steps, prepare=lambda memory, rank: None):
    """What every worker got at every step."""

    def work(comm):
        reducer, outs = parse(spec), []
        memory = reducer.init(LAYOUT, comm)
        prepare(memory, comm.rank)
        for step in range(steps):
            out = torch.empty(N)
            reduce(reducer, Step(LAYOUT), gradient(comm.rank, step), out, memory, comm)
            state.commit(memory)
            outs.append(out)
        return outs

    return threads.run(size, work)


def true_mean(size, step):
    return torch.stack([gradient(rank, step) for rank in range(size)]).mean(0)


def test_the_values_and_eight_bytes():
    x = gradient(0, 0)
    decoded, payload = roundtrip("RandomK(0.05)", x)
    assert len(payload.meta) == 8  # the key
    assert payload.body.numel() == 4 * 50
    sent = decoded != 0
    assert int(sent.sum()) == 50
    assert torch.equal(decoded[sent], x[sent])


def test_one_in_every_slice():
    """Stratified: between two neighbours there are less than two slices, also round the end."""
    decoded, _ = roundtrip("RandomK(0.05)", gradient(0, 0))
    places = decoded.nonzero().flatten()
    gaps = torch.cat([places.diff(), places[:1] + N - places[-1:]])
    assert int(gaps.max()) < 2 * N // 50


@cases(exchange=["AllReduce", "Ring"])
def test_all_workers_send_the_same_positions_so_that_sums_are_sums(exchange):
    for step, mean in enumerate(means(f"{exchange}(RandomK(0.1))", 3, 4)[0]):
        sent = mean != 0
        assert 98 <= int(sent.sum()) <= 102  # a ring draws in each of its segments
        torch.testing.assert_close(mean[sent], true_mean(3, step)[sent])


def test_in_an_all_gather_every_worker_draws_its_own():
    mean = means("AllGather(RandomK(0.1))", 2, 1)[0][0]
    halves = [gradient(rank, 0) / 2 for rank in (0, 1)]
    drawn = [torch.isclose(mean, half) for half in halves]
    both = (mean != 0) & ~drawn[0] & ~drawn[1]
    assert int(drawn[0].sum()) + int(both.sum()) == int(drawn[1].sum()) + int(both.sum()) == 100
    assert int(both.sum()) < 40  # chance gives ten
    torch.testing.assert_close(mean[both], true_mean(2, 0)[both])


def test_another_draw_at_each_step():
    masks = torch.stack([mean != 0 for mean in means("AllReduce(RandomK(0.1))", 2, 50)[0]])
    assert len({tuple(mask.tolist()) for mask in masks}) == 50
    assert bool((masks.sum(0) <= 20).all())  # nobody is drawn much more often than five times
    assert float((masks.sum(0) > 0).float().mean()) > 0.98


def test_a_step_that_is_rolled_back_is_drawn_again():
    compressor = RandomK(0.1)
    memory = compressor.init(LAYOUT, 3)

    def drawn():
        payload = compressor.encode(gradient(0, 0), memory)
        return payload.meta, payload.body.tolist()

    first = drawn()
    state.roll_back(memory)
    assert drawn() == first
    state.commit(memory)
    assert drawn()[0] != first[0]
    state.roll_back(memory)
    assert drawn()[1] != first[1]


def test_unbiased_in_the_mean():
    """Within five standard errors everywhere, although k does not divide n."""
    x = torch.linspace(-1, 1, 37)
    compressor, total, draws = RandomK(0.19, unbiased=True), torch.zeros(37, dtype=torch.float64), 4000
    for seed in range(draws):
        memory = compressor.init(Layout.flat(37), mix_seed(seed))
        total += decode(compressor, compressor.encode(x, memory), memory)
    k = 7
    error = x.double().abs() * ((37 / k - 1) / draws) ** 0.5
    assert bool(((total / draws - x).abs() <= 5 * error + 1e-9).all())


def test_unbiased_values_too_large_for_float32_are_saturated():
    x = torch.full((1000,), torch.finfo(torch.float32).max)
    decoded, _ = roundtrip("RandomK(0.01, unbiased=True)", x)
    assert bool(decoded.isfinite().all())
    assert float(decoded.max()) > 1e37


def test_a_nan_that_is_not_drawn_is_seen_too():
    x = gradient(0, 0)
    x[123] = torch.nan
    for seed in range(5):
        decoded, payload = roundtrip("RandomK(0.01)", x, seed=seed)
        assert payload.body.numel() == 40  # the length that others can be added to
        assert int(decoded.isnan().sum()) == 10


def test_workers_at_different_steps_are_refused_in_a_ring():
    def prepare(memory, rank):
        for segment in memory["segments"].values():
            segment["inner"]["calls"] = rank

    with pytest.raises(FrameError, match="different random numbers"):
        means("Ring(RandomK(0.1))", 2, 1, prepare)


def test_a_body_of_another_length_is_refused():
    compressor = RandomK(0.1)
    payload = compressor.encode(gradient(0, 0), compressor.init(LAYOUT, 0))
    body, meta = payload.body, payload.meta
    acc = torch.zeros(N)
    wrong = [(body[:-4], meta), (body[:3], meta), (torch.cat([body, body[:4]]), meta), (body, meta[:-1]), (body, b"")]
    for short_or_long, key in wrong:
        with pytest.raises(ValueError, match="take 8 bytes of meta and 400 of body"):
            accumulate(compressor, Payload(short_or_long, N, key), acc)
    assert not bool(acc.any())


def test_a_body_may_lie_at_any_address():
    compressor = RandomK(0.1)
    payload = compressor.encode(gradient(0, 0), compressor.init(LAYOUT, 0))
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), payload.body])[3:]
    decoded, there = torch.zeros(N), torch.zeros(N)
    accumulate(compressor, Payload(moved, N, payload.meta), decoded)
    accumulate(compressor, payload, there)
    assert torch.equal(decoded, there)


def test_grace_reseeded_everybodys_generator():
    """There, all ranks drew the same dropout masks from then on."""
    torch.manual_seed(17)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    means("AllReduce(RandomK(0.1))", 2, 2)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@cases(ratio=[0.3, 0.5, 0.9, 1.0])
def test_grace_drew_with_replacement(ratio):
    """There, half of the elements drawn were drawn twice at a ratio of 1."""
    x = gradient(0, 0)
    decoded, _ = roundtrip(f"RandomK({ratio})", x)
    assert int((decoded != 0).sum()) == round(ratio * N)
    assert torch.equal(decoded[decoded != 0], x[decoded != 0])


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        RandomK(0.0)
    with pytest.raises(ValueError, match="True or False"):
        RandomK(0.1, unbiased=1)
