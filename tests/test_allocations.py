"""In steady state a step allocates nothing of gradient size: page faults would cost more than the arithmetic.

At the size of real buckets, where sums are streamed and payloads decoded together, and with two workers, so that frames
are received.
"""

import threading
import tracemalloc
from collections.abc import Iterator

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from support.registered import LARGE_REDUCERS
from tersegrad.comm import threads
from tersegrad.core import Layout, Pending, Reducer, Step, added, nothing_left
from tersegrad.core import state as states
from tersegrad.reducers import Dense

LAYOUT = Layout(("a.weight", "a.bias", "b.weight"), ((1024, 1024), (1024,), (1023, 1024)))
NBYTES = 4 * LAYOUT.numel
assert LAYOUT.numel == 1 << 21


class _Direct(Pending):
    """A message that is copied once, into the receiver's buffer; its sender waits until that was done."""

    def __init__(self, x, into, channel, ticket, taken, given):
        self.x, self.into, self.channel, self.ticket, self.taken, self.given = x, into, channel, ticket, taken, given

    def wait(self):
        if self.into.numel():
            message = self.channel.get(self.ticket)
            self.into[: message.numel()].copy_(message)
            self.taken.put(message[:0])
        if self.x.numel():
            self.given.get(self.given.ticket())
        return self.into


class _Sum(Pending):
    def __init__(self, comm, x):
        self.comm, self.x = comm, x

    def wait(self):
        total = self.comm.total(self.x)
        everybody = self.comm.swap(self.x)
        torch.add(everybody[0], everybody[1], out=total)
        self.comm.barrier.wait()
        self.x.copy_(total)
        return self.x


class _NoCopies(threads.ThreadComm):
    """Two workers that allocate nothing to talk to each other, so that only the reducer's own allocations are seen."""

    acknowledged: dict

    def __init__(self, comm, barrier, acknowledged):
        super().__init__(comm._hub, comm.rank)
        self.barrier, self.acknowledged, self._totals = barrier, acknowledged, {}

    def start_shift(self, x, into, by=1):
        other = 1 - self.rank
        channel = self._hub.channels[self.rank][other]
        if x.numel():
            self._hub.channels[other][self.rank].put(x)
        ticket = channel.ticket() if into.numel() else -1
        return _Direct(x, into, channel, ticket, self.acknowledged[other], self.acknowledged[self.rank])

    def start_all_reduce(self, x):
        return _Sum(self, x)

    def broadcast(self, x, root=0):
        source = self.swap(x)[root]
        if self.rank != root:
            x.copy_(source)
        self.barrier.wait()

    def swap(self, x):
        self._hub.slots[self.rank] = x
        self.barrier.wait()
        return list(self._hub.slots)

    def total(self, x):
        key = x.numel(), x.dtype
        if key not in self._totals:
            self._totals[key] = torch.empty_like(x)
        return self._totals[key]


def allocations(events: list) -> Iterator[int]:
    """Bytes of every block that torch's allocator gave out, temporaries inside operators included."""
    for event in events:
        if event.typed[0] == _EventType.Allocation:
            yield event.typed[1].alloc_size
        yield from allocations(event.children)


def largest_allocation(reducer: Reducer) -> int:
    """Bytes of the largest block that one step of one of two workers asks torch or numpy for, after three steps."""
    barrier = threading.Barrier(2)
    acknowledged = {rank: threads.Channel() for rank in (0, 1)}
    gradient = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(0))
    numbers = {"lr": 0.1, "squares": torch.full((LAYOUT.numel,), 50.0)}  # so noisy that VGC sends few

    def work(comm: threads.ThreadComm) -> int:
        quiet, x = _NoCopies(comm, barrier, acknowledged), gradient.clone()
        memory = reducer.init(LAYOUT, comm)

        def step(number: int) -> None:
            x.copy_(gradient)
            reducer.start(Step(LAYOUT, number, **numbers), x, x, memory, quiet)()
            states.commit(memory)

        for number in range(3):
            step(number)
        barrier.wait()
        if comm.rank:
            step(3)
            step(4)
            return 0
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step(3)
        blocks = list(allocations(profiler.profiler.kineto_results.experimental_event_tree()))
        tracemalloc.start()
        step(4)
        numpy_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return max([*blocks, numpy_peak])

    return threads.run(2, work)[0]


@pytest.mark.parametrize("reducer", LARGE_REDUCERS, ids=repr)
def test_steady_state_allocates_nothing_of_gradient_size(reducer):
    biggest_sparse = 0.34  # of the gradient: what is sent, at most 4/3 of a quarter, is decoded into new memory
    if "Strom(tau=0" in repr(reducer) or "Threshold(tau=0" in repr(reducer):
        biggest_sparse = 1.1  # sends six elements of ten, or nearly all
    if "rule='paper'" in repr(reducer) and "FFT" in repr(reducer):
        biggest_sparse = 1.1  # transforms a tensor as a whole, and torch's transforms make their results anew
    assert largest_allocation(reducer) <= biggest_sparse * NBYTES


@pytest.mark.parametrize("waste", [lambda x: x.add_(x * 0.0), lambda x: x.add_(torch.from_numpy(x.numpy() * 0.0))])
def test_the_measurement_sees_an_allocation(waste):
    class _Wasteful(Dense):
        def start(self, step, x, out, state, comm):
            waste(added(x))
            return nothing_left

    assert largest_allocation(_Wasteful()) >= NBYTES
