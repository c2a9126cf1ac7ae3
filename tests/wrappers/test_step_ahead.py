"""StepAhead: the trajectory by hand, and parameters that are always back in time."""

import math

import pytest
import torch

from support import step_ahead_cases
from support.cases import cases
from tersegrad import parse

FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@cases(name=FORMATS)
@cases("by micro", [(1.0, 1), (2.5, 1), (1.0, 3)])
def test_the_trajectory_is_that_made_by_hand(gloo4, by, micro, name):
    for off, off_without in gloo4.run(step_ahead_cases.as_by_hand, by, FORMATS[name], micro):
        assert off < 1e-6
        assert off_without > 1e-4, "a step ahead that makes no difference shows nothing"


@cases(name=FORMATS)
@cases("clip scaled", [(0.3, False), (math.inf, True), (0.3, True)])
def test_it_goes_as_far_as_the_user_lets_the_gradient_go(gloo4, clip, scaled, name):
    for off, off_without in gloo4.run(step_ahead_cases.as_by_hand, 20.0, FORMATS[name], 1, clip, scaled):
        assert off < 1e-6
        assert off_without > 1e-4


def test_parameters_are_away_in_a_step_and_at_no_other_time(gloo4):
    for away in gloo4.run(step_ahead_cases.whereabouts):
        assert away.pop("in a step") > 1e-4
        assert away.pop("after no_sync") > 1e-4  # until the optimizer steps
        assert away == dict.fromkeys(away, 0.0)


def test_replicas_are_compared_where_they_belong(gloo4):
    first, *others = gloo4.run(step_ahead_cases.checked_replicas)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@cases(name=FORMATS)
def test_flush_puts_every_element_in_its_place(gloo4, name):
    assert max(gloo4.run(step_ahead_cases.flushed, FORMATS[name])) < 1e-7


@cases(
    "text told",
    [
        ("StepAhead(AllGather(TopK(0.1)))", "Write StepAhead(ErrorFeedback(AllGather(TopK(ratio=0.1))))"),
        ("StepAhead(StepAhead(ErrorFeedback(AllGather(TopK(0.1)))))", "by=2.0"),
        ("StepAhead(ErrorFeedback(AllGather(TopK(0.1))), by=-1)", "0 or more"),
        ("StepAhead(TopK(0.1))", "must be a reducer"),
        ("ErrorFeedback(StepAhead(ErrorFeedback(AllGather(TopK(0.1)))))", "a memory of its own"),
    ],
)
def test_what_makes_no_sense_is_refused(text, told):
    with pytest.raises((ValueError, TypeError), match="(?s)" + told.replace("(", r"\(").replace(")", r"\)")):
        parse(text)


def test_what_it_needs_is_asked_for(gloo4):
    gloo4.run(step_ahead_cases.refusals)
