"""Bugs of public implementations (GRACE, SIDCo's release, torch's hooks), each on every method it could touch."""

import torch

from support.cases import cases
from support.registered import COMPRESSORS, REDUCERS
from tersegrad import Metered, roundtrip
from tersegrad.comm import threads
from tersegrad.compressors import OneBit, RandomK, Threshold
from tersegrad.core import Layout, Step, needs_of, reduce
from tersegrad.reducers import AllGather, AllReduce, PowerSGD
from tersegrad.specs import PRESETS, parse
from tersegrad.testing import reducers, runs
from tersegrad.wrappers import ErrorFeedback

every_preset = cases(preset=PRESETS)


def test_grace_one_bit_decodes_to_507():
    """``~`` on uint8 is bitwise: [-1, -1, 2, 2] came back as [507, 507, 510, 510]."""
    assert roundtrip(OneBit(), torch.tensor([-1.0, -1.0, 2.0, 2.0]))[0].tolist() == [-1.0, -1.0, 2.0, 2.0]


@cases(size=[2, 3, 4])
def test_grace_powersgd_returns_the_sum(size):
    """A matrix of rank one, the same on all workers, came back ``size`` times too large."""
    bucket = Layout(("w",), ((30, 20),))
    x = torch.outer(torch.linspace(-1, 1, 30), torch.linspace(1, 2, 20)).reshape(-1)

    def work(comm):
        out = torch.empty_like(x)
        reducer = PowerSGD(rank=1)
        reduce(reducer, Step(bucket), x.clone(), out, reducer.init(bucket, comm), comm)
        return out

    runs.assert_close(threads.run(size, work)[0], x, 1e-5, "mean")


@cases(preset=[name for name in PRESETS if parse(name).loses(4) == 0])
def test_a_gradient_that_all_workers_share_comes_back_as_it_is_on_the_whole(preset):
    """Sum instead of mean: over some steps and what is remembered, nothing is multiplied by the number of workers."""
    x = torch.linspace(-1.0, 1.0, 5000)
    traces = runs.run(parse(preset), 4, lambda rank, step: x.clone(), Layout.flat(5000), steps=3)
    arrived = torch.stack(traces[0].means).sum(0) + runs.mean([t.held[-1] + sum(t.rests) for t in traces])
    runs.assert_close(arrived, runs.mean([sum(t.inputs) for t in traces]), 1e-4, "three gradients")
    if not needs_of(parse(preset)).no_momentum:
        runs.assert_close(arrived, 3 * x, 1e-4, "three gradients")


@every_preset
def test_grace_powersgd_makes_nan_of_zero(preset):
    traces = runs.run(parse(preset), 2, lambda rank, step: torch.zeros(5000), Layout.flat(5000))
    assert all(bool(m.isfinite().all()) for t in traces for m in t.means)


@cases(compressor=COMPRESSORS)
def test_sidco_raises_on_gradients_with_few_non_zeros(compressor):
    """RuntimeError: min() on zero, constant, sparse (5 of 1000) and tiny (3) tensors."""
    sparse = torch.zeros(1000)
    sparse[::200] = 1.0
    for x in (torch.zeros(1000), torch.full((1000,), 0.5), sparse, torch.tensor([1.0, -2.0, 3.0])):
        assert bool(roundtrip(compressor, x)[0].isfinite().all())


def test_grace_random_k_reseeds_the_world_and_draws_with_replacement():
    before = torch.get_rng_state()
    decoded, _ = roundtrip(RandomK(0.1), torch.ones(1000))
    assert torch.equal(before, torch.get_rng_state())
    assert int((decoded != 0).sum()) == 100, "a hundred different elements"


def test_grace_threshold_takes_the_largest_signed_value():
    """An all-negative tensor below the threshold was sent whole."""
    decoded, payload = roundtrip(Threshold(tau=1.0), -torch.linspace(0.0, 0.9, 1000))
    assert not decoded.any()
    assert payload.body.numel() < 50


def test_grace_all_gather_needs_equal_counts():
    """Workers whose selections differ in length."""
    reducer = ErrorFeedback(AllGather(Threshold(tau=0.5)))

    def gradient(rank, step):
        return torch.arange(1000) < 10 * 7**rank  # 10, 70, 490 ones

    traces = runs.run(reducer, 3, lambda rank, step: gradient(rank, step).float(), Layout.flat(1000), steps=1)
    want = runs.mean([gradient(rank, 0).float() for rank in range(3)])
    assert torch.equal(traces[2].means[0].double(), want.float().double())


@cases("preset bits", [("signsgd", 1), ("efsignsgd", 1), ("onebit", 1.1), ("terngrad", 1.6), ("qsgd", 4.1)])
def test_grace_sends_a_byte_for_a_bit(preset, bits):
    numel = 100_000
    bucket = Layout.flat(numel)

    def work(comm):
        metered, reducer = Metered(comm), parse(preset)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
        reduce(reducer, Step(bucket), x, x, reducer.init(bucket, comm), metered)
        return metered.total.sent

    assert threads.run(2, work)[0] <= bits * numel / 8 + 300


@cases(reducer=[r for r in REDUCERS if isinstance(r, AllReduce)])
def test_one_overflow_poisons_nothing_for_good(reducer):
    """torch's PowerSGD hook never recovers; nor does GRACE's residual. The law is run for all; here with feedback."""
    reducers.check_nonfinite(ErrorFeedback(reducer), float("inf"), 3)
