"""LowMemory: error feedback in fewer bytes; with a codec that loses nothing it is error feedback, bit for bit."""

import pytest
import torch

from support.cases import cases
from tersegrad.comm import threads
from tersegrad.compressors import BF16, Blockwise, Identity, PerTensor, TopK
from tersegrad.core import Layout, Step, reduce, state
from tersegrad.reducers import AllGather
from tersegrad.testing import inputs, reducers, runs
from tersegrad.wrappers import ErrorFeedback, LowMemory

INNER = AllGather(TopK(0.1))


def test_with_a_lossless_codec_it_is_error_feedback():
    a = runs.run(LowMemory(INNER, codec=Identity()), 3, inputs.GRADIENT, steps=6)
    b = runs.run(ErrorFeedback(INNER), 3, inputs.GRADIENT, steps=6)
    for x, y in zip(a, b, strict=True):
        assert all(torch.equal(m, n) for m, n in zip(x.means + x.held, y.means + y.held, strict=True))


@cases("codec lost", [(BF16(), 2.0**-8), (Blockwise(), 2.0**-4)])
def test_only_the_rounding_of_the_residual_is_lost(codec, lost):
    """The telescoping sum is off by what was rounded away in each step, and no more."""
    steps = 12
    traces = runs.run(LowMemory(INNER, codec=codec), 2, inputs.GRADIENT, steps=steps)
    sent = torch.stack(traces[0].means).double().sum(0)
    late = runs.mean([t.held[-1] for t in traces])
    total = runs.mean([torch.stack(t.gradients).double().sum(0) for t in traces])
    held = max(float(h.abs().max()) for t in traces for h in t.held)
    runs.assert_close(sent + late, total, steps * lost * held, "telescoping sum")


def kept_bytes(reducer) -> int:
    """Of all that lives between two steps, saved and scratch, after three steps; shared buffers aside."""
    bucket = Layout(("a", "b"), ((300, 1000), (700, 1000)))

    def work(comm):
        memory = reducer.init(bucket, comm)
        out = torch.empty(bucket.numel)
        for step in range(3):
            x = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(step))
            reduce(reducer, Step(bucket), x, out, memory, comm)
            state.commit(memory)
        memory.pop("inner")
        return sum(tensor.untyped_storage().nbytes() for tensor in _storages(memory).values())

    return threads.run(1, work)[0]


def _storages(memory) -> dict[int, torch.Tensor]:
    found = {}
    for value in memory.values():
        if isinstance(value, dict):
            found |= _storages(value)
        elif isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value
    return found


def test_it_keeps_fewer_bytes():
    numel = 1_000_000
    assert kept_bytes(ErrorFeedback(INNER)) == pytest.approx(8 * numel, rel=0.01)
    blocks = 300_000  # of a codec's scratch, however many tensors and elements there are
    assert kept_bytes(LowMemory(INNER)) <= 4 * numel + blocks
    assert kept_bytes(LowMemory(INNER, codec=Blockwise())) <= 2.02 * numel + blocks


def test_what_was_not_sent_is_the_residual():
    reducers.check_telescoping(LowMemory(INNER, codec=Identity()), 2)
    trace = runs.run(LowMemory(INNER), 1, inputs.GRADIENT)[0]
    assert trace.held[-1].any()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="applied twice"):
        LowMemory(ErrorFeedback(INNER))
    for codec in (TopK(0.1), PerTensor(BF16())):
        with pytest.raises(ValueError, match="codec=BF16"):
            LowMemory(INNER, codec=codec)
