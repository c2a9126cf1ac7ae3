"""Schedule: the formulas, the position in the state, and what is refused."""

import math

import pytest
import torch

from support.cases import cases
from tersegrad import parse
from tersegrad.core import Layout, state
from tersegrad.testing import runs

LAYOUT = Layout.flat(1000)


def sent(spec: str, steps: int, states=None, first=0) -> tuple[list[int], dict]:
    """How many elements went out at each step, and the state at the end."""

    def gradient(rank: int, step: int) -> torch.Tensor:
        return torch.randn(1000, generator=torch.Generator().manual_seed(step))

    traces = runs.run(parse(spec), 1, gradient, LAYOUT, steps, first=first, states_before=states)
    return [int(mean.count_nonzero()) for mean in traces[0].means], traces[0].state


def test_by_steps():
    counts, _ = sent("Schedule(AllGather(TopK(0.5)), 'ratio', steps={0: 0.1, 2: 0.02, 3: 1.0})", 5)
    assert counts == [100, 100, 20, 1000, 1000]


def test_with_the_drop_of_the_learning_rate(monkeypatch):
    rates = [0.01, 0.1, 0.1, 0.06, 0.05, 0.01, 0.04]  # it warms up first: the highest so far counts
    monkeypatch.setattr(runs, "learning_rate", lambda step: rates[step])
    counts, _ = sent("Schedule(AllGather(TopK(0.1)), 'ratio', drops={1.0: 0.1, 0.5: 1.0})", 7)
    assert counts == [100, 100, 100, 100, 1000, 1000, 1000]


def test_theta_squared_is_l_times_the_learning_rate():
    schedule = parse("Schedule(AllGather(TopK(0.001)), 'ratio', smoothness=4.0)")
    thetas = [1 - schedule.value(0, lr, 1.0) for lr in (0.2, 0.05, 0.0125, 0.0)]
    assert thetas == pytest.approx([math.sqrt(0.8), math.sqrt(0.2), math.sqrt(0.05), 0.0])
    assert thetas[0] / thetas[1] == pytest.approx(math.sqrt(0.2 / 0.05))
    assert schedule.value(0, 100.0, 1.0) == 0.001  # never below what inner says


def test_the_position_is_in_the_state():
    spec = "Schedule(ErrorFeedback(AllGather(TopK(0.5))), 'ratio', steps={0: 0.1, 3: 0.02})"
    whole, _ = sent(spec, 6)
    begun, saved = sent(spec, 2)
    rest, _ = sent(spec, 4, states=[state.copy(saved)], first=2)
    assert begun + rest == whole == [100, 100, 100, 20, 20, 20]


def test_a_step_that_was_not_finite_does_not_count():
    reducer = parse("Schedule(AllGather(TopK(0.5)), 'ratio', steps={0: 0.1, 1: 0.02})")
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    gradients = [torch.full((1000,), math.nan), x, x]
    traces = runs.run(reducer, 1, lambda rank, step: gradients[step].clone(), LAYOUT, 3)
    assert [int(mean.count_nonzero()) for mean in traces[0].means[1:]] == [100, 20]


@cases(
    "arguments message",
    [
        ("'ratio'", "give one of steps, drops, smoothness; none was given"),
        ("'ratio', steps={0: 0.1}, smoothness=1.0", "steps and smoothness was given"),
        ("'theta', smoothness=1.0", "has 0 numbers of that name.*It has: ratio"),
        ("'ratio', smoothness=0.0", "positive"),
        ("'ratio', steps={5: 0.1}", "what to begin with"),
        ("'ratio', steps=[0.1]", "what to begin with"),
        ("'ratio', drops={0.5: 0.1}", "what to begin with"),
        ("'ratio', steps={0: 0.1, 9: 7.0}", "a fraction is above 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(f"Schedule(AllGather(TopK(0.1)), {arguments})")


def test_two_numbers_of_a_name_are_refused():
    two = "ByName({'a*': AllGather(TopK(0.1))}, default=AllGather(TopK(0.2)))"
    with pytest.raises(ValueError, match="has 2 numbers"):
        parse(f"Schedule({two}, 'ratio', steps={{0: 0.1}})")


def test_without_a_learning_rate_it_says_who_should_tell():
    with pytest.raises(ValueError, match="optimizer=optimizer"):
        parse("Schedule(AllGather(TopK(0.1)), 'ratio', smoothness=1.0)").value(0, None, 0.0)
