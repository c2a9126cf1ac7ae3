"""Dense: the mean of everything, divided before it is added, in whatever dtype the bucket has."""

import torch

from support.cases import cases
from support.exchange_cases import reduced
from tersegrad import Dense
from tersegrad.comm import threads
from tersegrad.core import Layout, Needs, Step, Sum, reduce


def gaussian(rank, n=1000):
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


def in_order(xs):
    """x / n, added in rank order, bit for bit as all workers must."""
    total = xs[0] / len(xs)
    for x in xs[1:]:
        total = total + x / len(xs)
    return total


@cases(size=[1, 2, 3, 4])
def test_the_mean_and_nothing_left(size):
    xs = [gaussian(rank) for rank in range(size)]
    for out, rest in reduced(Dense(), xs):
        assert torch.equal(out, in_order(xs))
        assert not bool(rest.any())


@cases(dtype=[torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_bucket_keeps_its_dtype_and_is_divided_before_it_is_added(dtype):
    largest = torch.finfo(dtype).max / 2  # a sum of three is infinite
    xs = [torch.full((5,), largest, dtype=dtype) * sign for sign in (1, 1, 1, 0.5)]

    def work(comm):
        x, layout = xs[comm.rank].clone(), Layout(("x",), ((5,),), dtype=dtype)
        reduce(Dense(), Step(layout), x, x, {}, comm)
        return x

    for mean in threads.run(4, work):
        assert mean.dtype == dtype
        assert bool(mean.isfinite().all())
        assert torch.equal(mean, in_order(xs))


def test_in_place_it_is_the_same_mean():
    def work(comm):
        x = gaussian(comm.rank)
        reduce(Dense(), Step(Layout.flat(1000)), x, x, {}, comm)
        return x

    xs = [gaussian(rank) for rank in range(3)]
    assert all(torch.equal(mean, in_order(xs)) for mean in threads.run(3, work))


def test_a_sum_is_added_up_and_all_of_it_is_sent():
    a, b = ([gaussian(10 * i + rank) for rank in range(2)] for i in (1, 2))

    def work(comm):
        total, out = torch.empty(1000), torch.empty(1000)
        x = Sum(a[comm.rank].clone(), b[comm.rank].clone(), total)
        reduce(Dense(), Step(Layout.flat(1000)), x, out, {}, comm)
        return out, total

    for out, left in threads.run(2, work):
        assert torch.equal(out, in_order([a[0] + b[0], a[1] + b[1]]))
        assert not bool(left.any())


def test_the_mean_is_there_when_it_has_been_waited_for():
    def work(comm):
        x, out = torch.full((4,), float(comm.rank)), torch.empty(4)
        finish = Dense().start(Step(Layout.flat(4)), x, out, {}, comm)
        under_way = out.tolist()
        assert finish() is None, "nobody looked whether it is finite"
        return under_way, out.tolist()

    assert threads.run(2, work) == [([0.0] * 4, [0.5] * 4), ([0.5] * 4, [0.5] * 4)]


def test_it_asks_for_nothing_and_loses_nothing():
    assert Dense().needs() == Needs(float32=False)
    assert Dense().loses(1000) == 0.0
    assert threads.run(1, lambda comm: Dense().init(Layout.flat(3), comm)) == [{}]
