"""In steady state a step allocates nothing of gradient size: page faults would cost more than the arithmetic."""

import tracemalloc
from collections.abc import Iterator

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from support.registered import REDUCERS
from tersegrad.comm.torch import threads
from tersegrad.core import state
from tersegrad.core import Bucket, Reducer
from tersegrad.reducers import Dense

NUMEL = 1_000_000
BUCKET = Bucket(("a.weight", "a.bias", "b.weight"), ((500, 1000), (1000,), (499, 1000)))


def allocations(events: list) -> Iterator[int]:
    """Bytes of every block that torch's allocator gave out, temporaries inside operators included."""
    for event in events:
        if event.typed[0] == _EventType.Allocation:
            yield event.typed[1].alloc_size
        yield from allocations(event.children)


def largest_allocation(reducer: Reducer) -> int:
    """Bytes of the largest block that one step asks torch or numpy for, after two steps of warming up."""
    assert BUCKET.numel == NUMEL
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    gradient = x.clone()

    def work(comm: threads.ThreadComm) -> int:
        memory, quiet = reducer.init(BUCKET, comm), _Quiet(comm)
        BUCKET.lr, BUCKET.squares = 0.1, torch.full((NUMEL,), 50.0)  # so noisy that VGC sends few

        def step() -> None:
            x.copy_(gradient)
            reducer.reduce(BUCKET, x, x, memory, quiet)
            state.settle(memory, keep=True)

        for _ in range(3):
            step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        blocks = list(allocations(profiler.profiler.kineto_results.experimental_event_tree()))
        tracemalloc.start()
        step()
        numpy_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return max([*blocks, numpy_peak])

    return threads.run(1, work)[0]


class _Quiet(threads.ThreadComm):
    """A Comm of one worker that copies nothing, so that only the reducer's own allocations are seen."""

    def __init__(self, comm: threads.ThreadComm):
        self.rank, self.size = comm.rank, comm.size

    def all_reduce(self, x):
        pass

    def all_gather(self, x):
        return [x]

    def broadcast(self, x, root=0):
        pass


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_steady_state_allocates_nothing_of_gradient_size(reducer):
    biggest_sparse = 0.25  # of the gradient: TopK(0.2) sends a fifth of the elements and decodes them into new memory
    if "Strom(tau=0" in repr(reducer) or "Threshold(tau=0" in repr(reducer):
        biggest_sparse = 1.1  # sends six elements of ten, or nearly all
    if "TopK(ratio=1.0)" in repr(reducer):
        biggest_sparse = 1.1  # sends everything as a sparse vector: as many indices and values as elements
    assert largest_allocation(reducer) <= biggest_sparse * 4 * NUMEL


@pytest.mark.parametrize("waste", [lambda x: x.add_(x * 0.0), lambda x: x.add_(torch.from_numpy(x.numpy() * 0.0))])
def test_the_measurement_sees_an_allocation(waste):
    class _Wasteful(Dense):
        def reduce(self, bucket, x, out, state, comm):
            waste(x)

    assert largest_allocation(_Wasteful()) >= 4 * NUMEL
