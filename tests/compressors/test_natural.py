"""Natural: unbiased, of the published variance, nine bits an element, with nothing but torch and numba."""

import pytest
import torch

from support.quantisers import assert_unbiased, check_draws, check_nonfinite, check_rolled_back_draws, draws
from support.vectors import gaussian
from tersegrad.compressors import Natural
from tersegrad.core import Payload, accumulate


def test_the_mean_over_many_draws_is_the_vector_and_the_variance_what_it_should_be():
    """On a CPU: a peer's natural compression does not run without another package and a GPU."""
    x, count = gaussian(600) * 10.0 ** gaussian(600, 1), 2000
    seen, magnitude = draws(Natural(), x, count), x.double().abs()
    below = torch.ldexp(torch.ones(600, dtype=torch.float64), torch.frexp(magnitude)[1] - 1)
    variance = (magnitude - below) * (2 * below - magnitude)
    assert bool((variance <= magnitude.square() / 8 * (1 + 1e-9)).all())  # the bound of the paper
    assert_unbiased(seen, x, variance, magnitude)
    squares = (seen - x.double()).square().mean(0)
    assert float((squares / magnitude.square()).sum()) == pytest.approx(
        float((variance / magnitude.square()).sum()), rel=0.05
    )


def test_no_element_is_off_by_more_than_itself_even_at_the_ends_of_float32():
    x = torch.cat([gaussian(1000) * 3e-38, gaussian(1000), gaussian(1000).clamp(-3, 3) * 1e38])
    seen = draws(Natural(), x, 20)
    assert bool(seen.isfinite().all())
    assert bool(((seen - x.double()).abs() <= x.double().abs()).all())


def test_a_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"10 elements of Natural\(\) take 12 bytes, got 8"):
        accumulate(Natural(), Payload(torch.zeros(8, dtype=torch.uint8), 10), torch.zeros(10))


def test_draws_change_with_step_and_seed_and_a_step_that_is_rolled_back_is_drawn_again():
    check_draws(Natural())
    check_rolled_back_draws(Natural())


def test_what_is_not_finite_has_no_body():
    check_nonfinite(Natural())
