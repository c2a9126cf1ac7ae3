"""Costs of a spec: the bytes it will send with any number of workers, out of a try with two."""

import pytest
import torch

from tersegrad import parse
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.core import Layout, Step, reduce
from tersegrad.core import state as states
from tersegrad.plan import codecs
from tersegrad.plan.codecs import BucketCost, Network, split
from tersegrad.plan.cost import Link
from tersegrad.plan.made_up import Gradients

LAYOUT = Layout(("w", "b"), ((120, 200), (200,)))
GRADIENT = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    "text",
    [
        "Dense()",
        "AllReduce(BF16())",
        "ErrorFeedback(AllGather(TopK(0.01)))",
        "AllGather(QSGD(bits=4))",
        "ErrorFeedback(PowerSGD(rank=2))",
        "TwoShot(BF16())",
        "Ring(BF16(), pieces=1)",
    ],
)
def test_predicted_bytes_are_sent(text, workers):
    spec = parse(text)
    cost = codecs.measure(spec, LAYOUT, GRADIENT)

    def work(comm):
        metered = Metered(comm)
        x = GRADIENT.clone()
        reduce(spec, Step(LAYOUT, lr=0.1), x, x, spec.init(LAYOUT, metered), metered)
        return metered.total.sent

    sent = threads.run(workers, work)[0]
    predicted = split(cost, workers, Network.of(Link())).sent
    assert predicted == pytest.approx(sent, rel=0.01, abs=8)


@pytest.mark.parametrize("workers", [2, 4])
def test_bytes_of_vgc_are_those_of_a_step_in_which_it_sends(workers):
    spec, gradients = parse("ErrorFeedback(VGC(alpha=1.5))"), Gradients(GRADIENT, LAYOUT)

    def work(comm):
        state, sent = spec.init(LAYOUT, comm), []
        for number in range(codecs.LATER + 10):
            metered, x = Metered(comm), gradients.of(comm.rank, number)
            reduce(spec, Step(LAYOUT, number, squares=gradients.squares), x, x, state, metered)
            states.commit(state)
            sent.append(metered.total.sent)
        return sent

    sent = threads.run(workers, work)[0]
    predicted = split(codecs.measure(spec, LAYOUT, GRADIENT), workers, Network.of(Link())).sent
    assert predicted > 1000 * (workers - 1), "more than headers"
    assert predicted == pytest.approx(sum(sent[-10:]) / 10, rel=0.3)


def test_times_add_up():
    cost = BucketCost(100, encode=0.5, decode=0.25, messages=(("all_gather", 1000), ("all_reduce", 400)), memory=0)
    link = Link(1e4, 0.01)
    parts = split(cost, 4, Network(Link(1e4, 0.01, busy=0.5), link))
    assert parts.encode == 0.5
    assert parts.decode == 4 * 0.25
    assert parts.wait == pytest.approx(3000 / 1e4 + 0.01 + 600 / 1e4 + 0.06)
    assert parts.sent == 3600
    assert parts.work == pytest.approx(1.5 + 0.5 * (600 / 1e4 + 0.06))
    assert parts.service.seconds == pytest.approx(1.5 + parts.wait)


def test_memory_counts_every_buffer_once():
    numel = LAYOUT.numel
    assert codecs.measure(parse("Dense()"), LAYOUT, GRADIENT).memory == 0
    feedback = codecs.measure(parse("ErrorFeedback(AllReduce(Identity()))"), LAYOUT, GRADIENT).memory
    assert feedback >= 2 * 4 * numel
    whole = torch.zeros(10)
    assert codecs.nbytes_of({"a": whole, "_b": whole[:4], "n": 3, "inner": {"c": torch.zeros(2)}}) == 48


def test_a_step_ahead_takes_time_before_forward_and_a_tensor_of_the_weights_size():
    inside = codecs.measure(parse("ErrorFeedback(AllGather(TopK(0.01)))"), LAYOUT, GRADIENT)
    around = codecs.measure(parse("StepAhead(ErrorFeedback(AllGather(TopK(0.01))))"), LAYOUT, GRADIENT)
    assert inside.ahead == 0.0 < around.ahead
    assert around.memory == inside.memory + GRADIENT.nbytes
    assert around.messages == inside.messages
    assert around.scaled(2 * LAYOUT.numel).ahead == 2 * around.ahead


def test_buckets_of_one_shape_are_measured_once_and_many_shapes_are_scaled(monkeypatch):
    measured = []

    def fake(spec, bucket, gradient):
        measured.append(bucket.numel)
        return BucketCost(bucket.numel, 1e-9 * bucket.numel, 0.0, (("all_gather", 4 * bucket.numel),), bucket.numel)

    monkeypatch.setattr(codecs, "measure", fake)
    same = [Layout.flat(100), Layout.flat(100, "y"), Layout.flat(50)]
    codecs.measure_all(parse("Dense()"), same, [torch.zeros(0)] * 3)
    assert sorted(measured) == [50, 100]
    measured.clear()
    many = [Layout.flat(n) for n in range(100, 2100, 100)]
    costs = codecs.measure_all(parse("Dense()"), many, [torch.zeros(0)] * 20)
    assert len(measured) <= codecs.MOST_LAYOUTS
    assert 2000 in measured
    assert [cost.numel for cost in costs] == [bucket.numel for bucket in many]
    assert [cost.messages[0][1] for cost in costs] == [4 * bucket.numel for bucket in many]
