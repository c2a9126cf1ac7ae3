"""TernGrad: unbiased without clipping, of known variance and exact size, and what went wrong elsewhere."""

import math

import pytest
import torch

from support.cases import cases
from support.quantisers import (
    check_draws,
    check_nonfinite,
    check_refused_number,
    check_rolled_back_draws,
)
from support.vectors import gaussian
from tersegrad.compressors import TernGrad
from tersegrad.core import Layout
from tersegrad.reducers import AllGather
from tersegrad.testing.runs import run
from tersegrad.wrappers import ErrorFeedback


def scales_of(spec, x):
    """The s of each element."""
    parts = x.double().split(spec.bucket or x.numel())
    return torch.cat([p.abs().max().expand(p.numel()) for p in parts])


def test_one_nan_does_not_poison_the_memory_of_error_feedback():
    """A peer's memory was NaN throughout (4096 of 4096) after one NaN."""

    def gradient(rank, step):
        x = gaussian(4096, seed=2 * step + rank)
        if step == 1 and rank == 1:
            x[7] = math.nan
        return x

    for trace in run(ErrorFeedback(AllGather(TernGrad(bucket=64))), 2, gradient, Layout.flat(4096)):
        assert bool(trace.means[1].isnan().all())
        assert torch.equal(trace.held[0], trace.held[1])
        assert bool(trace.held[2].isfinite().all())


@cases(clip=[0, 0.5, -1.0, math.inf, math.nan, True, "2.5"])
def test_refusals(clip):
    with pytest.raises(ValueError, match=r"1 or more.*Write clip=None for none"):
        TernGrad(clip=clip)
    with pytest.raises(ValueError, match="a whole number of elements"):
        TernGrad(bucket=0)


def test_draws_change_with_step_and_seed_and_a_step_that_is_rolled_back_is_drawn_again():
    check_draws(TernGrad())
    check_rolled_back_draws(TernGrad())


def test_what_is_not_finite_has_no_body():
    check_nonfinite(TernGrad())


@cases(scale=[math.nan, math.inf, -1.0])
def test_a_scale_that_cannot_be_is_refused_before_anything_is_added(scale):
    check_refused_number(TernGrad(), scale, r"TernGrad\(\)(: a scale must not be| received a number)")
