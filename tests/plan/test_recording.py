"""Exchanges as they are recorded: of tersegrad's own reducers, and of reducers that nobody here has heard of."""

from dataclasses import dataclass

import pytest
import torch

from tersegrad import parse
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.core import Layout, Reducer, Step, nothing_left, reduce
from tersegrad.plan import codecs
from tersegrad.plan.codecs import Network, split
from tersegrad.plan.cost import Link, load

LAYOUT = Layout(("w", "b"), ((120, 200), (24_000,)))
GRADIENT = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, repr=False)
class _Own(Reducer):
    """A mean in some pattern of its own; what arrives is not looked at."""

    pattern: str

    def init(self, layout, comm):
        return {}

    def start(self, step, x, out, state, comm):
        if comm.size > 1:
            getattr(self, self.pattern)(x.view(torch.uint8), comm)
        return nothing_left

    def straight(self, x, comm):
        for pending in [comm.start_shift(x, torch.empty_like(x), by) for by in range(1, comm.size)]:
            pending.wait()

    def pass_on(self, x, comm):
        for _ in range(comm.size - 1):
            comm.start_shift(x, torch.empty_like(x)).wait()

    def two_shots(self, x, comm):
        self.straight(x[: x.numel() // comm.size], comm)
        self.straight(x[: x.numel() // comm.size], comm)

    def ring(self, x, comm):
        self.pass_on(x[: x.numel() // comm.size], comm)
        self.pass_on(x[: x.numel() // comm.size], comm)

    def gossip(self, x, comm):
        comm.start_shift(x, torch.empty_like(x)).wait()

    def gather(self, x, comm):
        comm.all_gather(x)

    def broadcast(self, x, comm):
        comm.broadcast(x, root=1)

    def sum_and_gather(self, x, comm):
        comm.all_reduce(torch.zeros(100))
        self.straight(x, comm)

    def both(self, x, comm):
        half = x.numel() // 2
        self.straight(x[:half], comm)
        self.two_shots(x[half:], comm)


def sent(spec, workers):
    def work(comm):
        metered, x = Metered(comm), GRADIENT.clone()
        step = Step(LAYOUT, lr=0.1, squares=4.0 * GRADIENT.square())
        reduce(spec, step, x, x, spec.init(LAYOUT, metered), metered)
        return metered.total.sent

    return max(threads.run(workers, work))


@pytest.mark.parametrize(
    ("spec", "exchanges"),
    [
        (parse("ErrorFeedback(AllGather(TopK(0.01)))"), ["all_gather"]),
        (parse("AllReduce(BF16())"), ["all_reduce"]),
        (parse("ErrorFeedback(TwoShot(TopK(0.01)))"), ["two_shot"]),
        (parse("TwoShot(QSGD(bits=4))"), ["two_shot"]),
        (parse("Ring(BF16(), pieces=1)"), ["ring"]),
        (parse("ErrorFeedback(Ring(TopK(0.01), pieces=1))"), ["ring"]),
        (parse("Ring(BF16())"), ["ring"]),
        (parse("SignSGD()"), ["two_shot"]),
        (parse("ByName({'w': Ring(BF16(), pieces=1)}, AllGather(BF16()), tiny=0)"), ["ring", "all_gather"]),
        (_Own("straight"), ["all_gather"]),
        (_Own("two_shots"), ["two_shot"]),
        (_Own("ring"), ["ring"]),
        (_Own("pass_on"), ["ring_gather"]),
        (_Own("gossip"), ["neighbour"]),
        (_Own("gather"), ["ring_gather", "ring_gather"]),
        (_Own("broadcast"), ["broadcast"]),
        (_Own("sum_and_gather"), ["all_reduce", "all_gather"]),
        (_Own("both"), ["two_shot", "all_gather"]),
    ],
    ids=repr,
)
def test_the_exchange_is_what_the_reducer_does(spec, exchanges):
    cost = codecs.measure(spec, LAYOUT, GRADIENT)
    assert [exchange for exchange, _ in cost.messages] == exchanges
    slack = 128 * 5 if "TopK" in repr(spec) else 0  # a few hundred indices take more bytes in smaller segments
    for workers in (2, 4, 5):
        predicted = split(cost, workers, Network.of(Link())).sent
        assert predicted == pytest.approx(sent(spec, workers), rel=0.015, abs=slack), f"{workers} workers"


@pytest.mark.parametrize(
    ("pattern", "hops"), [("straight", 1), ("two_shots", 2), ("ring", 14), ("pass_on", 7), ("gossip", 1)]
)
def test_hops_are_counted_as_messages_wait_for_each_other(pattern, hops):
    ((exchange, nbytes),) = codecs.measure(_Own(pattern), LAYOUT, GRADIENT).messages
    assert load(exchange, 8, nbytes).hops == hops
