"""Half spectra as bins: all backends give the reference's bits, and refuse what does not fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.backends import every, others, reference
from support.cases import cases
from tersegrad.kernels import cpu

OPS = "fold", "unfold", "gather_pairs", "scatter_add_pairs"
both = every(*OPS)


def spectra(pieces, length, seed, scale=1.0):
    x = torch.randn(pieces, length, generator=torch.Generator().manual_seed(seed)) * scale
    return torch.fft.rfft(x, norm="ortho")


def folded(kernel, half):
    count = half.shape[0] * (half.shape[1] - 1)
    bins, magnitudes = torch.full((2 * count,), -7.0), torch.full((count,), -7.0)
    kernel.fold(half, bins, magnitudes)
    return bins, magnitudes


shapes = st.tuples(st.integers(0, 9), st.integers(1, 70))


@others(*OPS)
@given(shape=shapes, seed=st.integers(0, 2**32), exponent=st.integers(-140, 120))
def test_fold_and_unfold_agree_with_the_reference(kernel, shape, seed, exponent):
    half = spectra(shape[0], 2 * shape[1], seed, 2.0**exponent) if shape[0] else torch.empty(0, shape[1] + 1).cfloat()
    assert_agrees(kernel, half)


@others(*OPS)
def test_long_vectors(kernel):
    assert_agrees(kernel, spectra(257, 4096, 1))


def assert_agrees(kernel, half):
    (bins, magnitudes), (bins2, magnitudes2) = folded(kernel, half), folded(reference, half)
    assert torch.equal(bins, bins2)
    assert torch.equal(magnitudes, magnitudes2)
    back, back2 = torch.empty_like(half), torch.full_like(half, 5.0)
    kernel.unfold(bins, back)
    reference.unfold(bins, back2)
    assert torch.equal(torch.view_as_real(back), torch.view_as_real(back2))


@both
@cases(length=[2, 4, 6, 64, 1000])
def test_unfold_undoes_fold_and_energy_is_kept(kernel, length):
    x = torch.randn(5, length, generator=torch.Generator().manual_seed(1))
    half = torch.fft.rfft(x, norm="ortho")
    bins, magnitudes = folded(kernel, half)
    back = torch.empty_like(half)
    kernel.unfold(bins, back)
    assert torch.allclose(back, half, rtol=1e-6, atol=1e-7)
    assert torch.allclose(bins.view(5, -1).square().sum(1), x.square().sum(1), rtol=1e-5)
    assert torch.allclose(magnitudes, bins.view(-1, 2).norm(dim=1), rtol=1e-6)


@both
@cases(bad=[float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_magnitudes(kernel, bad):
    half = spectra(2, 8, 0)
    half[1, 2] = complex(0.0, bad)
    _, magnitudes = folded(kernel, half)
    assert magnitudes.isfinite().tolist() == [True] * 6 + [False] + [True]


@others(*OPS)
@given(pairs=st.integers(1, 60), seed=st.integers(0, 2**32), scale=st.floats(-3, 3, width=32), share=st.floats(0, 1))
def test_pairs_agree_with_the_reference(kernel, pairs, seed, scale, share):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(2 * pairs, generator=generator)
    indices = (torch.rand(pairs, generator=generator) < share).nonzero().flatten().int()
    values = torch.randn(2 * indices.numel(), generator=generator)
    taken, accs = [], []
    for each in (kernel, reference):
        taken.append(torch.empty_like(values))
        each.gather_pairs(numbers, indices, taken[-1])
        accs.append(numbers.clone())
        each.scatter_add_pairs(accs[-1], indices, values, scale)
    assert torch.equal(*taken)
    assert torch.equal(taken[0], numbers.view(-1, 2)[indices.long()].flatten())
    assert torch.equal(*accs)


@both
@cases(index=[-1, 3, 2**31 - 1])
def test_a_pair_that_is_not_there_is_refused_before_anything_is_written(kernel, index):
    acc, indices = torch.zeros(6), torch.tensor([0, index], dtype=torch.int32)
    with pytest.raises(IndexError, match="has 3 elements"):
        kernel.scatter_add_pairs(acc, indices, torch.ones(4), 1.0)
    assert not bool(acc.any())
    with pytest.raises(IndexError, match="has 3 elements"):
        kernel.gather_pairs(acc, indices, torch.ones(4))


@both
def test_lengths_that_do_not_fit_are_refused(kernel):
    half = spectra(2, 8, 0)
    with pytest.raises(ValueError, match="have 8 bins, got 14 numbers and 8 magnitudes"):
        kernel.fold(half, torch.empty(14), torch.empty(8))
    with pytest.raises(ValueError, match="have 8 bins, got 16 numbers and 7 magnitudes"):
        kernel.fold(half, torch.empty(16), torch.empty(7))
    with pytest.raises(ValueError, match="have 8 bins, got 18 numbers"):
        kernel.unfold(torch.empty(18), half)
    with pytest.raises(ValueError, match="rows of complex64"):
        kernel.fold(half.to(torch.complex128), torch.empty(16), torch.empty(8))
    with pytest.raises(ValueError, match="two for each"):
        kernel.gather_pairs(torch.zeros(6), torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    with pytest.raises(ValueError, match="not pairs"):
        kernel.gather_pairs(torch.zeros(5), torch.zeros(1, dtype=torch.int32), torch.zeros(2))


def test_rows_that_are_not_side_by_side_are_refused():
    with pytest.raises(TypeError, match="contiguous"):
        cpu.unfold(torch.empty(16), spectra(2, 16, 0)[:, ::2])
