"""SignSGD: the majority decides, ties by chance, momentum as in Signum, and traffic that does not grow."""

import math

import pytest
import torch

from support.cases import cases
from tersegrad.comm import threads
from tersegrad.comm.frame import FrameError
from tersegrad.comm.metered import Metered
from tersegrad.core import HEADER_NBYTES, Layout, Step, reduce
from tersegrad.reducers import SignSGD
from tersegrad.reducers.signsgd import _BALLOT, _read_ballot, _set_magnitude
from tersegrad.testing.runs import run


def gaussian(n, *seeds):
    return torch.randn(n, generator=torch.Generator().manual_seed(hash(seeds) % 2**31))


def gradient_of(n):
    return lambda rank, step: gaussian(n, 17, rank, step)


@cases(size=[1, 3, 5])
@cases(n=[1, 2, 100, 3001])
def test_the_majority_decides(size, n):
    traces = run(SignSGD(), size, gradient_of(n), Layout.flat(n), steps=2)
    for step in range(2):
        votes = torch.stack([gradient_of(n)(rank, step).sign() for rank in range(size)]).sum(0)
        assert all(torch.equal(trace.means[step], votes.sign()) for trace in traces)


@cases(size=[2, 4])
def test_a_majority_decides_and_ties_go_each_way_as_often(size):
    n = 40_000
    traces = run(SignSGD(), size, gradient_of(n), Layout.flat(n), steps=2)
    for step in range(2):
        votes = torch.stack([gradient_of(n)(rank, step).sign() for rank in range(size)]).sum(0)
        out, tied = traces[0].means[step], votes == 0
        assert torch.equal(out[~tied], votes[~tied].sign())
        assert bool((out[tied].abs() == 1).all())
        assert abs(float(out[tied].sum())) < 5 * math.sqrt(int(tied.sum()))
        # and no worker is favoured
        assert abs(float((out * gradient_of(n)(0, step).sign())[tied].sum())) < 5 * math.sqrt(int(tied.sum()))


def test_ties_are_decided_anew_at_each_step_and_the_same_for_the_same_seed():
    def gradient(rank, step):
        return torch.ones(5000) if rank else -torch.ones(5000)

    (first, *_), (again, *_) = (run(SignSGD(), 2, gradient, Layout.flat(5000, seed=1), steps=2) for _ in range(2))
    (other, *_) = run(SignSGD(), 2, gradient, Layout.flat(5000, seed=2), steps=1)
    assert torch.equal(first.means[0], again.means[0])
    assert abs(float((first.means[0] * first.means[1]).sum())) < 5 * math.sqrt(5000)
    assert abs(float((first.means[0] * other.means[0]).sum())) < 5 * math.sqrt(5000)


@cases(size=[1, 2, 3, 4])
def test_the_magnitude_is_one_or_the_mean_over_workers(size):
    n = 1000
    one, mean = (
        run(SignSGD(scale=s), size, gradient_of(n), Layout.flat(n), steps=1)[0].means[0] for s in ("one", "mean")
    )
    want = sum(float(gradient_of(n)(rank, 0).double().abs().mean()) for rank in range(size)) / size
    assert bool((one.abs() == 1).all())
    assert mean.abs().unique().numel() == 1
    assert float(mean.abs()[0]) == pytest.approx(want, rel=1e-6)
    assert torch.equal(one, mean.sign())


def test_momentum_is_that_of_signum():
    n, b = 1000, 0.75
    traces = run(SignSGD(momentum=b), 3, gradient_of(n), Layout.flat(n), steps=4)
    means = [torch.zeros(n, dtype=torch.float64) for _ in range(3)]
    for step in range(4):
        means = [b * m + (1 - b) * gradient_of(n)(rank, step).double() for rank, m in enumerate(means)]
        votes = torch.stack([m.sign() for m in means]).sum(0)
        assert torch.equal(traces[0].means[step], votes.sign().float())
    for trace, m in zip(traces, means, strict=True):
        assert torch.allclose(trace.state["momentum"].double(), m, atol=1e-6)


def test_a_nan_leaves_the_momentum_as_it_was():
    def gradient(rank, step):
        x = gradient_of(500)(rank, step)
        if rank == 2 and step == 1:
            x[499] = math.nan
        return x

    def without(rank, step):
        return gradient_of(500)(rank, 2 * step)  # steps 0 and 2

    poisoned = run(SignSGD(momentum=0.9), 3, gradient, Layout.flat(500), steps=3)
    clean = run(SignSGD(momentum=0.9), 3, without, Layout.flat(500), steps=2)
    for a, b in zip(poisoned, clean, strict=True):
        assert bool(a.means[1].isnan().all())
        assert torch.equal(a.state["momentum"], b.state["momentum"])


def bytes_sent(size, n):
    def work(comm):
        metered = Metered(comm)
        bucket, x = Layout.flat(n), gaussian(n, comm.rank)
        metered.begin(bucket.id)
        reduce(SignSGD(), Step(bucket), x, x, {}, metered)
        metered.end()
        return metered.total.sent

    return max(threads.run(size, work))


def test_traffic_does_not_grow_with_the_number_of_workers():
    n = 96_000
    for size in (2, 3, 4, 6):
        frame = HEADER_NBYTES + 4 + n // size // 8
        assert bytes_sent(size, n) == 2 * (size - 1) * frame
        assert bytes_sent(size, n) < n / 4 + 2 * size * (HEADER_NBYTES + 4)


@cases(magnitude=[math.nan, math.inf, -1.0])
def test_a_ballot_that_cannot_be_is_refused_with_its_rank(magnitude):
    ballot = _BALLOT.encode(gaussian(100), {})
    _set_magnitude(ballot, magnitude)
    with pytest.raises(FrameError, match=r"rank 3 sent a frame that cannot be decoded: .*"):
        _read_ballot(ballot, 3)


@cases(arguments=[{"momentum": 1.0}, {"momentum": -0.1}, {"momentum": True}, {"scale": "two"}])
def test_refusals(arguments):
    with pytest.raises(ValueError, match=r"from 0 to below 1|write 'one' or 'mean'"):
        SignSGD(**arguments)
