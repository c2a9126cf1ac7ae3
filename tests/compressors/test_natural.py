"""Natural: unbiased, of the published variance, nine bits an element, with nothing but torch and numba."""

import math

import pytest
import torch

from tersegrad.compressors import Natural
from tersegrad.core import HEADER_NBYTES, Layout, Payload, accumulate, sections
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import decode, roundtrip


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def draws(x, count, seed=0):
    """What ``count`` encodings of the same vector decode to, one row each."""
    spec = Natural()
    state = spec.init(Layout.flat(x.numel()), seed)
    rows = []
    for _ in range(count):
        rows.append(decode(spec, spec.encode(x, state), state))
        states.commit(state)
    return torch.stack(rows).double()


def test_the_mean_over_many_draws_is_the_vector_and_the_variance_what_it_should_be():
    """On a CPU: a peer's natural compression does not run without another package and a GPU."""
    x, count = gaussian(600) * 10.0 ** gaussian(600, 1), 2000
    seen, magnitude = draws(x, count), x.double().abs()
    below = torch.ldexp(torch.ones(600, dtype=torch.float64), torch.frexp(magnitude)[1] - 1)
    variance = (magnitude - below) * (2 * below - magnitude)
    assert bool((variance <= magnitude.square() / 8 * (1 + 1e-9)).all())  # the bound of the paper
    z = (seen.mean(0) - x.double()).abs() / ((variance / count).sqrt() + 2.0**-22 * magnitude)
    assert float(z.max()) < 5
    assert 0.8 < float(z.square().mean()) < 1.2  # what is measured is noise, and not smaller than it should be
    squares = (seen - x.double()).square().mean(0)
    assert float((squares / magnitude.square()).sum()) == pytest.approx(
        float((variance / magnitude.square()).sum()), rel=0.05
    )


def test_no_element_is_off_by_more_than_itself_even_at_the_ends_of_float32():
    x = torch.cat([gaussian(1000) * 3e-38, gaussian(1000), gaussian(1000).clamp(-3, 3) * 1e38])
    seen = draws(x, 20)
    assert bool(seen.isfinite().all())
    assert bool(((seen - x.double()).abs() <= x.double().abs()).all())


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000, 12_345])
def test_size_is_exact_nine_bits_an_element(n):
    _, payload = roundtrip(Natural(), gaussian(n))
    assert payload.nbytes == HEADER_NBYTES + math.ceil(9 * n / 8)
    assert sections(Natural(), payload) == {"exponents": n, "signs": math.ceil(n / 8)}


def test_draws_change_with_step_and_seed_and_nothing_else():
    x = gaussian(1000)
    first, again, other = (draws(x, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_a_step_that_is_forgotten_is_drawn_again():
    x, spec = gaussian(1000), Natural()
    state = spec.init(Layout.flat(1000), 0)
    body = spec.encode(x, state).body.clone()
    states.roll_back(state)
    assert torch.equal(spec.encode(x, state).body, body)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_body(bad):
    x = gaussian(1000)
    x[613] = bad
    spec = Natural()
    state = spec.init(Layout.flat(1000), 0)
    payload = spec.encode(x, state)
    states.commit(state)
    assert not payload.finite
    assert sections(spec, payload) == {}
    assert state["calls"] == 0


def test_a_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"10 elements of Natural\(\) take 12 bytes, and 8 came"):
        accumulate(Natural(), Payload(torch.zeros(8, dtype=torch.uint8), 10), torch.zeros(10))
