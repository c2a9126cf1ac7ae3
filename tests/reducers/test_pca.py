"""Principal axes against numpy's singular value decomposition of the covariance, and against scikit-learn."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from support.cases import cases
from tersegrad.reducers.gradiveq.pca import energy_outside, principal_axes, rank_for


def centred(samples, length, seed=0, decay=0.8):
    """Rows whose energies fall geometrically along hidden directions."""
    rng = np.random.default_rng([samples, length, seed])
    scales = decay ** np.arange(length)
    rows = (rng.normal(size=(samples, length)) * scales) @ np.linalg.qr(rng.normal(size=(length, length)))[0]
    rows -= rows.mean(0)
    return torch.from_numpy(rows.astype(np.float32))


def projector(axes):
    return axes.double() @ axes.double().T


shapes = cases("samples length", [(200, 30), (30, 200), (60, 60), (2, 50), (500, 3)])


@shapes
@cases(loss=[0.5, 0.1, 0.01, 1e-4])
def test_projector_is_that_of_the_covariance(samples, length, loss):
    rows = centred(samples, length)
    axes = principal_axes(rows[None], loss)[0]
    u, energies, _ = np.linalg.svd(np.cov(rows.numpy().astype(np.float64), rowvar=False))
    d = axes.shape[1]
    assert d == 1 + int((np.cumsum(energies) < (1 - loss) * energies.sum()).sum())
    assert torch.dist(projector(axes), torch.from_numpy(u[:, :d] @ u[:, :d].T)) < 1e-4


@shapes
def test_sklearn_keeps_as_many(samples, length):
    rows = centred(samples, length, seed=5)
    theirs = PCA(n_components=0.99, svd_solver="full").fit(rows.numpy().astype(np.float64))
    axes = principal_axes(rows[None], 0.01)[0]
    assert axes.shape[1] == theirs.n_components_
    assert torch.dist(projector(axes), projector(torch.from_numpy(theirs.components_.T))) < 1e-4


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(1, 40), st.floats(0, 0.9), st.floats(0.3, 1.0), st.integers(0, 99))
def test_target_met_with_as_few_as_possible(samples, length, loss, decay, seed):
    rows = centred(samples, length, seed, decay)
    axes = principal_axes(rows[None], loss)
    total = float(rows.double().square().sum())
    assert torch.allclose(axes[0].T @ axes[0], torch.eye(axes.shape[2]), atol=1e-5), "not orthonormal"
    assert axes.shape[2] <= min(length, samples - 1) or axes.shape[2] == 1
    assert energy_outside(rows[None], axes) <= (loss + 1e-5) * total
    if axes.shape[2] > 1:
        fewer = energy_outside(rows[None], axes[:, :, :-1])
        assert fewer >= (loss - 1e-5) * total, "one axis fewer would have done"


def test_energy_is_squared():
    """With singular values instead of their squares, a target would cost many more axes."""
    values = torch.tensor([10.0, 1.0, 1.0, 1.0, 1.0]).double()
    assert rank_for(values.square(), 0.04) == 1
    assert rank_for(values, 0.04) == 5


def test_a_complete_basis_loses_nothing():
    rows = centred(300, 20, decay=1.0)
    axes = principal_axes(rows[None], 0.0)
    assert axes.shape[2] == 20
    fresh = torch.randn(1, 50, 20, generator=torch.Generator().manual_seed(1))
    assert energy_outside(fresh, axes) < 1e-10 * float(fresh.square().sum())


@cases(samples=[10, 100])
def test_rank_is_found_and_reproduced(samples):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(4, 64, generator=generator)
    rows = torch.randn(samples, 4, generator=generator) @ hidden
    axes = principal_axes(rows[None], 1e-9)
    assert axes.shape[2] == 4
    fresh = torch.randn(1, 20, 4, generator=generator) @ hidden
    assert energy_outside(fresh, axes) < 1e-9 * float(fresh.square().sum())


def test_without_loss_every_sample_is_reproduced():
    rows = centred(12, 300, decay=0.9)
    axes = principal_axes(rows[None], 0.0)
    assert axes.shape[2] == 11  # the mean takes one
    assert energy_outside(rows[None], axes) < 1e-9 * float(rows.square().sum())


def test_groups_share_their_number_of_axes():
    rows = torch.stack([centred(20, 9, seed=1), 3 * centred(20, 9, seed=2, decay=0.5)])
    axes = principal_axes(rows, 0.05)
    energies = sum(torch.linalg.svdvals(group.double()).square() for group in rows)
    assert axes.shape == (2, 9, rank_for(energies, 0.05))
    for group, own in zip(rows, axes, strict=True):
        alone = torch.linalg.svd(group.double()).Vh[: axes.shape[2]].T
        assert torch.dist(projector(own), projector(alone)) < 1e-4


def test_noise_with_few_samples_looks_compressible_and_is_not():
    """The trap: as many axes as samples hold all of the samples and nearly nothing of the next gradient."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 100, 768, generator=generator)
    axes = principal_axes(noise - noise.mean(1, keepdim=True), 0.01)
    assert 768 / axes.shape[2] > 7.5
    fresh = torch.randn(1, 50, 768, generator=generator)
    assert energy_outside(fresh, axes) / float(fresh.square().sum()) > 0.8


def test_rows_of_zeros():
    axes = principal_axes(torch.zeros(1, 5, 8), 0.01)
    assert axes.shape == (1, 8, 1)
    assert bool(axes.isfinite().all())
