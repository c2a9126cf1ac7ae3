"""A short soak, and the soak against a method that is broken on purpose."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tersegrad.core import Memory, Reducer, reduce, stage
from tersegrad.lab import soak
from tersegrad.reducers import Dense
from tersegrad.specs import parse_reducer
from tersegrad.wrappers import Schedule, StepAhead, Warmup


def test_a_hundred_steps_among_threads():
    tally = soak.soak(100, 1, processes=False)
    assert tally.steps == 100
    assert tally.restarts > 0
    assert tally.nonfinite > 0
    assert tally.large_steps > 0
    assert 0 < tally.worst < 1


@pytest.mark.parametrize("large", [False, True])
def test_an_episode_in_real_processes(large):
    changes = "Schedule(AllGather(TopK(0.1)), 'ratio', steps={0: 0.5, 4: 0.1})"
    soak.in_processes(f"StepAhead(ErrorFeedback({changes}))", 2, 3, 12, large)


@pytest.mark.parametrize("spec", ["topk", "sidco", "powersgd", "ErrorFeedback(Ring(QSGD(bits=4)))"])
def test_presets_with_restarts_and_nan(spec):
    plan = soak.Plan.drawn(parse_reducer(spec), np.random.default_rng(9), 20)
    assert len(plan.restarts) > 1
    assert plan.nonfinite
    soak.episode(plan)


@pytest.mark.parametrize("spec", ["topk4", "LowMemory(AllGather(TopK(0.1)))", "AllReduce(BF16())", "VGC()", "dgc"])
def test_large_buckets(spec):
    plan = soak.Plan.drawn(parse_reducer(spec), np.random.default_rng(1), large=True)
    assert plan.is_large
    assert plan.size > 1
    assert 0 <= soak.episode(plan) < 1


def test_methods_come_in_phases_that_end():
    rng = np.random.default_rng(0)
    drawn = [soak.with_phases(parse_reducer("topk"), rng) for _ in range(60)]
    outermost = {type(reducer) for reducer in drawn}
    assert {Schedule, StepAhead, Warmup} < outermost
    assert any(isinstance(r, StepAhead) and isinstance(r.inner, Warmup) for r in drawn)
    assert soak.with_phases(Dense(), rng) in (Dense(), Warmup(Dense(), steps=soak.PHASE)), "nothing else fits"


@dataclass(frozen=True, repr=False)
class _Broken(Memory):
    """A mean with a fault."""

    fault: str
    inner: Reducer = field(default_factory=Dense)
    lost: float = 0.0

    def loses(self, workers):
        return self.lost

    def start(self, step, x, out, state, comm):
        reduce(self.inner, step, x, out, state["inner"], comm)
        if self.fault == "replicas" and comm.rank == comm.size - 1:
            out[0] += 1e-3
        if self.fault == "loses":
            out[-1] *= 0.9
        if self.fault == "launders":
            out.nan_to_num_(0.0, 0.0, 0.0)
        if self.fault == "memory":
            state["residual"] = state["residual"] + 1.0  # at once, not when the step is committed
        stage(state, residual=state["residual"].clone())
        x.zero_()
        return lambda: None


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("replicas", "holds other means than rank 0"),
        ("loses", "something was lost or made"),
        ("launders", "finite is True"),
        ("memory", "changed a state"),
    ],
)
def test_the_soak_finds_what_it_looks_for(fault, says):
    plan = soak.Plan(_Broken(fault), 3, {"a": (7, 5), "b": (4,)}, 10, 5, {0: [["a", "b"]]}, {4: 1})
    with pytest.raises(AssertionError, match=says):
        soak.episode(plan)
    soak.episode(soak.Plan(_Broken("none"), 3, {"a": (7, 5), "b": (4,)}, 10, 5, {0: [["a", "b"]]}, {4: 1}))


def test_what_is_lost_is_allowed_as_far_as_it_is_stated():
    def plan(lost):
        return soak.Plan(_Broken("loses", lost=lost), 3, {"a": (7, 5), "b": (4,)}, 10, 5, {0: [["a", "b"]]}, {4: 1})

    worst = soak.episode(plan(0.1))
    assert 0 < worst < 1
    with pytest.raises(AssertionError, match="something was lost or made"):
        soak.episode(plan(0.1 * worst / 2))


def test_growth_is_seen():
    assert soak.growth([100] * 40) == 0
    assert soak.growth([1, 50, *[100] * 30]) == 0, "what is allocated while warming up does not count"
    tally = soak.Tally(resident=[i * (8 << 20) for i in range(40)], traced=[0] * 40)
    with pytest.raises(AssertionError, match="the resident set grew by"):
        soak._assert_no_growth(tally)
