"""Keeping pace: every bucket is exchanged once a round, in order, whatever gradients come; nothing is left behind."""

import threading

import pytest
import torch
from torch import nn

from tersegrad.comm import threads
from tersegrad.plan import model, sync_overhead


class Net(nn.Module):
    """Three layers, of which one may stay unused."""

    def __init__(self, used=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.used = used

    def forward(self, x):
        for layer in self.layers[: self.used]:
            x = layer(x)
        return x


def run(comm, used=3, exchange=None):
    net = Net(used)
    buckets = model.assign_buckets(
        [(name, tuple(p.shape)) for name, p in reversed(list(net.named_parameters()))], first=4, cap=4
    )
    said, steps = [], []

    def count(word):
        said.append(threading.current_thread().name)
        comm.all_gather(word)

    loss = lambda: net(torch.ones(2, 8)).square().mean()  # noqa: E731
    seconds = sync_overhead.measure(net, loss, lambda: steps.append(len(said)), buckets, exchange or count, comm)
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    assert steps == [len(buckets) * (i + 1) for i in range(len(steps))]
    assert set(said) == {"tersegrad pace"}
    return seconds


@pytest.mark.parametrize("used", [3, 2, 1])
def test_all_buckets_are_exchanged_before_the_optimizer_steps(used):
    seconds = threads.run(2, lambda comm: run(comm, used))
    assert seconds[0] == seconds[1] > 0


def test_an_exchange_that_fails_is_not_waited_for():
    def fail(word):
        raise ConnectionError("the network is gone")

    before = threading.active_count()
    with pytest.raises(ConnectionError, match="the network is gone"):
        threads.run(1, lambda comm: run(comm, exchange=fail))
    assert threading.active_count() == before
