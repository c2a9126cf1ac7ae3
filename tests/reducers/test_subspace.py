"""Coefficients in a subspace: what may be added, and what may not."""

import pytest
import torch

from support.cases import cases
from tersegrad.reducers.gradiveq.subspace import Subspace

SLICES, LENGTH, D = 12, 40, 7


def made(groups=1, d=D, mean=1.0):
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(groups, LENGTH, d, generator=generator)).Q
    return Subspace.around(mean * torch.randn(SLICES, LENGTH, generator=generator), basis.contiguous())


def gradients(count, seed=1):
    return torch.randn(count, SLICES, LENGTH, generator=torch.Generator().manual_seed(seed))


def coefficients(space, slices):
    c = torch.empty(space.size)
    space.encode(slices, c)
    return c


def decoded(space, c):
    slices = torch.empty_like(space.mean)
    space.decode(c, slices)
    return slices + space.mean


every_grouping = cases(groups=[1, 3, SLICES])


@every_grouping
@cases(workers=[1, 2, 5])
def test_mean_of_coefficients_is_coefficients_of_the_mean(groups, workers):
    space, g = made(groups), gradients(workers)
    mean = torch.stack([coefficients(space, one) for one in g]).mean(0)
    assert torch.allclose(mean, coefficients(space, g.mean(0)), atol=1e-5)


@every_grouping
def test_the_formula(groups):
    space, g = made(groups), gradients(1)[0]
    share = SLICES // groups
    for m in range(SLICES):
        u, mu = space.basis[m // share], space.mean[m]
        assert torch.allclose(coefficients(space, g).view(SLICES, D)[m], u.T @ (g[m] - mu), atol=1e-5)
        assert torch.allclose(decoded(space, coefficients(space, g))[m], u @ (u.T @ (g[m] - mu)) + mu, atol=1e-5)


def test_affine_not_linear():
    """Whoever adds coefficients as if they were linear subtracts the mean once too often."""
    a, b = gradients(2)
    space = made()
    wrong = coefficients(space, a) + coefficients(space, b) - coefficients(space, a + b)
    assert torch.allclose(wrong, -space.offset.view(-1), atol=1e-4)
    flat = made(mean=0.0)
    assert torch.allclose(coefficients(flat, a) + 3 * coefficients(flat, b), coefficients(flat, a + 3 * b), atol=1e-4)


@every_grouping
def test_a_projection_about_the_mean(groups):
    space, g = made(groups), gradients(1)[0]
    once = decoded(space, coefficients(space, g))
    assert torch.allclose(decoded(space, coefficients(space, once)), once, atol=1e-5)
    error = (g - once).view(groups, -1, LENGTH)
    assert float((error @ space.basis).abs().max()) < 1e-4, "the error is not orthogonal to the basis"
    assert float((once - space.mean).norm()) <= float((g - space.mean).norm())


def test_complete_basis_is_lossless():
    space, g = made(d=LENGTH), gradients(1)[0]
    assert torch.allclose(decoded(space, coefficients(space, g)), g, atol=1e-5)
    energy, outside = space.energies(g, coefficients(space, g))
    assert outside < 1e-6 * energy


@every_grouping
def test_local_loss_is_that_of_the_decoded_slices(groups):
    space, g = made(groups), gradients(1)[0]
    c = coefficients(space, g)
    energy, outside = space.energies(g, c)
    assert energy == pytest.approx(float(g.square().sum()), rel=1e-5)
    assert outside == pytest.approx(float((g - decoded(space, c)).square().sum()), rel=1e-5)


@every_grouping
def test_slices_in_order_are_decoded_where_they_lie(groups):
    space, g = made(groups), gradients(1)[0]
    c = coefficients(space, g)
    there, left = torch.full_like(g, torch.nan), g.clone()
    space.decode_in_order(c, there, subtract=False)
    space.decode_in_order(c, left, subtract=True)
    assert torch.allclose(there, decoded(space, c), atol=1e-5)
    assert torch.allclose(left, g - decoded(space, c), atol=1e-5)


def test_some_of_the_slices():
    space, g = made(), gradients(1)[0]
    c = coefficients(space, g).view(SLICES, -1)
    part = space.rows(1, 3)
    assert (part.count, part.size) == (2, c[1:3].numel())
    assert torch.allclose(coefficients(part, g[1:3]), c[1:3].reshape(-1), atol=1e-5)
    assert torch.allclose(decoded(part, c[1:3].reshape(-1)), decoded(space, c.reshape(-1))[1:3], atol=1e-5)
