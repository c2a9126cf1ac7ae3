"""Every: silent steps add up, the n-th sends; a NaN in a silent step is heard by all."""

import pytest
import torch

from tersegrad import Metered
from tersegrad.comm import threads
from tersegrad.compressors import TopK
from tersegrad.core import Layout, Step, reduce
from tersegrad.reducers import AllGather, Dense
from tersegrad.testing import inputs, reducers, runs
from tersegrad.wrappers import ErrorFeedback, Every


def test_the_third_step_sends_the_sum_of_three():
    traces = runs.run(Every(Dense(), n=3), 2, inputs.GRADIENT, steps=6)
    means = traces[0].means
    assert [bool(m.any()) for m in means] == [False, False, True] * 2
    for last in (2, 5):
        total = runs.mean([sum(t.gradients[last - 2 : last + 1]) for t in traces])
        runs.assert_close(means[last], total, 1e-4, "sum of three steps")


def test_a_nan_in_a_silent_step_is_heard_by_all_and_forgotten():
    reducers.check_nonfinite(Every(Dense(), n=100), torch.nan, 3)
    reducers.check_nonfinite(Every(Dense(), n=2), torch.inf, 3)


def test_silent_steps_send_one_number():
    def work(comm):
        metered, bucket, reducer = Metered(comm), Layout.flat(10_000), Every(Dense(), n=4)
        state = reducer.init(bucket, comm)
        reduce(reducer, Step(bucket), torch.ones(10_000), torch.empty(10_000), state, metered)
        return metered.total.payload

    assert threads.run(2, work) == [4, 4]


def test_with_n_1_it_is_error_feedback():
    a = runs.run(Every(AllGather(TopK(0.1)), n=1), 2, inputs.GRADIENT, steps=4)[0]
    b = runs.run(ErrorFeedback(AllGather(TopK(0.1))), 2, inputs.GRADIENT, steps=4)[0]
    assert all(torch.equal(x, y) for x, y in zip(a.means, b.means, strict=True))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="applied twice"):
        Every(ErrorFeedback(AllGather(TopK(0.1))))
    with pytest.raises(ValueError, match="applied twice"):
        ErrorFeedback(Every(Dense()))
    with pytest.raises(ValueError, match="1 or more"):
        Every(Dense(), n=0)
