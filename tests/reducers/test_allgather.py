"""AllGather: payloads of any length, decoded in rank order; each worker keeps what it did not send."""

import pytest
import torch

from support.cases import cases
from support.exchange_cases import reduced
from tersegrad import QSGD, AllGather, Identity, TopK
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.compressors import Threshold
from tersegrad.core import Layout, Step, reduce
from tersegrad.reducers import Dense


def gaussian(rank, n=1000):
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


def top(x, k):
    kept = torch.zeros_like(x)
    where = torch.topk(x.abs(), k).indices
    kept[where] = x[where]
    return kept


@cases(size=[1, 2, 3, 4])
def test_the_mean_of_what_every_worker_sent_and_its_own_rest(size):
    xs = [gaussian(rank) for rank in range(size)]
    sent = [top(x, 100) for x in xs]
    want = torch.stack(sent).double().mean(0)
    for x, mine, (out, rest) in zip(xs, sent, reduced(AllGather(TopK(0.1)), xs), strict=True):
        assert torch.allclose(out.double(), want, atol=1e-7)
        assert torch.equal(rest, x - mine)


def test_payloads_are_decoded_in_rank_order():
    """Float32 sums depend on their order: only one of these makes the small number vanish."""
    large = 4 * 2.0**26
    for values, total in (([large, 4.0, -large, 0.0], 0.0), ([large, -large, 4.0, 0.0], 1.0)):
        for out, _ in reduced(AllGather(Identity()), [torch.full((5,), value) for value in values]):
            assert out.tolist() == [total] * 5


def test_workers_may_send_different_numbers_of_elements():
    xs = [torch.where(torch.arange(1000) < count, 1.0 + torch.arange(1000) / 1000, 0.1) for count in (0, 3, 500)]
    sent = [torch.where(x > 0.5, x, 0.0) for x in xs]
    for out, _ in reduced(AllGather(Threshold(0.5)), xs):
        torch.testing.assert_close(out, torch.stack(sent).mean(0))


def test_every_worker_draws_random_numbers_of_its_own():
    x = gaussian(0)
    rests = [rest for _, rest in reduced(AllGather(QSGD(2)), [x, x, x])]
    assert not torch.equal(rests[0], rests[1])
    assert not torch.equal(rests[1], rests[2])


def test_traffic_grows_with_the_workers():
    def sent(size):
        def work(comm):
            meter, x, layout = Metered(comm), gaussian(comm.rank), Layout.flat(1000)
            reducer = AllGather(Identity())
            reduce(reducer, Step(layout), x, x, reducer.init(layout, comm), meter)
            return meter.total.sent

        return threads.run(size, work)[0]

    assert [sent(size) for size in (1, 2, 3, 5)] == [(size - 1) * (64 + 4000) for size in (1, 2, 3, 5)]


def test_start_sends_and_finish_waits():
    """All of the payload is on its way when start returns; the others' is needed only at the end."""

    def work(comm):
        layout, reducer, log = Layout.flat(100), AllGather(Identity()), []
        x, out = torch.full((100,), float(comm.rank)), torch.full((100,), -1.0)
        finish = reducer.start(Step(layout), x, out, reducer.init(layout, comm), comm)
        log.append((bool((out == -1).all()), bool(x.any()), comm.handed_over))
        finish()
        return [*log, (out.unique().tolist(), comm.handed_over)]

    frame = 64 + 400
    assert threads.run(2, work) == [[(True, False, frame), ([0.5], frame)]] * 2


def test_a_reducer_is_not_a_compressor():
    with pytest.raises(TypeError, match=r"Write e\.g\. AllGather\(TopK\(ratio=0\.01\)\)"):
        AllGather(Dense())
