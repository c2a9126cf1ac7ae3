"""Warmup: dense first, then the method; undone steps do not count."""

import pytest
import torch

from tersegrad import parse
from tersegrad.compressors import TopK
from tersegrad.reducers import AllGather, Dense
from tersegrad.testing import inputs, reducers, runs
from tersegrad.wrappers import ErrorFeedback, Warmup


def arrived(trace: runs.Trace) -> list[bool]:
    """In which steps everything arrived."""
    return [bool((mean != 0).float().mean() > 0.9) for mean in trace.means]


def test_dense_first():
    trace = runs.run(parse("Warmup(ErrorFeedback(AllGather(TopK(0.1))), steps=2)"), 2, inputs.GRADIENT, steps=4)[0]
    assert arrived(trace) == [True, True, False, False]
    assert not trace.held[1].any(), "dense steps leave no residual"
    assert trace.held[2].any()


def test_a_step_that_is_undone_does_not_count():
    def poisoned(rank, step):
        x = inputs.GRADIENT(rank, step)
        if step == 1:
            x[5] = torch.nan
        return x

    trace = runs.run(Warmup(AllGather(TopK(0.1)), steps=2), 2, poisoned, steps=4)[0]
    assert arrived(trace)[2:] == [True, False]


def test_it_goes_on_after_a_checkpoint_in_the_warm_up():
    reducers.check_state(Warmup(ErrorFeedback(AllGather(TopK(0.1))), steps=4))


def test_with_no_steps_it_is_the_method():
    plain = runs.run(AllGather(TopK(0.1)), 2, inputs.GRADIENT)[0]
    warm = runs.run(Warmup(AllGather(TopK(0.1)), steps=0), 2, inputs.GRADIENT)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain.means, warm.means, strict=True))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="would be lost"):
        Warmup(Dense(), first=ErrorFeedback(AllGather(TopK(0.1))))
    with pytest.raises(ValueError, match="0 or more"):
        Warmup(Dense(), steps=-1)
    with pytest.raises(TypeError, match=r"Write Warmup\(AllGather\(TopK"):
        Warmup(TopK(0.1))
