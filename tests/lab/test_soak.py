"""A short soak, and the soak against a method that is broken on purpose."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tersegrad.core import Reducer, later
from tersegrad.reducers import Dense
from tersegrad.specs.parse import parse_reducer
from tersegrad.testing import soak


def test_a_hundred_steps_among_threads():
    tally = soak.soak(100, 1, processes=False)
    assert tally.steps == 100
    assert tally.restarts > 0
    assert tally.poisoned > 0
    assert 0 < tally.worst < 1


def test_an_episode_in_real_processes():
    soak.in_processes("topk", size=2, seed=3, steps=12)


@pytest.mark.parametrize("spec", ["topk", "sidco", "powersgd", "ErrorFeedback(Ring(QSGD(bits=4)))"])
def test_presets_with_restarts_and_poison(spec):
    plan = soak.Plan.drawn(parse_reducer(spec), np.random.default_rng(9), 20)
    assert len(plan.restarts) > 1
    assert plan.poison
    soak.episode(plan)


@dataclass(frozen=True, repr=False)
class _Broken(Reducer):
    """A mean with a fault."""

    fault: str
    remembers = True

    def init(self, bucket, comm):
        return {"residual": torch.zeros(bucket.numel)}

    def reduce(self, bucket, x, out, state, comm):
        Dense().reduce(bucket, x, out, {}, comm)
        if self.fault == "replicas" and comm.rank == comm.size - 1:
            out[0] += 1e-3
        if self.fault == "loses":
            out[-1] *= 0.9
        if self.fault == "launders":
            out.nan_to_num_(0.0, 0.0, 0.0)
        if self.fault == "memory":
            state["residual"] = state["residual"] + 1.0  # at once, not when the step is settled
        later(state, residual=state["residual"])
        x.zero_()

    def waiting(self, bucket, state):
        return state["residual"]

    def flush(self, bucket, out, state):
        out.add_(state["residual"])


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("replicas", "holds other means than rank 0"),
        ("loses", "something was lost or made"),
        ("launders", "finite is True"),
        ("memory", "changed a memory"),
    ],
)
def test_the_soak_finds_what_it_looks_for(fault, says):
    plan = soak.Plan(_Broken(fault), 3, {"a": (7, 5), "b": (4,)}, 10, 5, {0: [["a", "b"]]}, {4: 1})
    with pytest.raises(AssertionError, match=says):
        soak.episode(plan)
    soak.episode(soak.Plan(_Broken("none"), 3, {"a": (7, 5), "b": (4,)}, 10, 5, {0: [["a", "b"]]}, {4: 1}))


def test_growth_is_seen():
    assert soak.growth([100] * 40) == 0
    assert soak.growth([1, 50, *[100] * 30]) == 0, "what is allocated while warming up does not count"
    tally = soak.Tally(resident=[i * (8 << 20) for i in range(40)], traced=[0] * 40)
    with pytest.raises(AssertionError, match="the resident set grew by"):
        soak._assert_no_growth(tally)
