"""The CPU selection kernels agree with their torch reference; torch.topk and numpy are its oracles."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from tersegrad.kernels.cpu import select as cpu
from tersegrad.kernels.reference import select as reference

both = pytest.mark.parametrize("kernel", [cpu, reference], ids=["cpu", "reference"])
SIZES = [0, 1, 2, 15, 16, 17, 63, 64, 65, 1000, 4097, 100_003]
BROKEN = [math.nan, -math.nan, math.inf, -math.inf]
GUARD = -7  # what memory next to a result holds before and must hold after


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def layers(n):
    """Stretches of very different scales, as gradients of a deep network are."""
    scales = torch.exp(2 * gaussian(20, seed=1)).repeat_interleave(n // 20 + 1)[:n]
    return gaussian(n) * scales


def one_nonzero(n):
    x = torch.zeros(n)
    x[n // 3 : n // 3 + 1] = -1e-45
    return x


SHAPES = {
    "gaussian": gaussian,
    "layers": layers,
    "zeros": torch.zeros,
    "signed zeros": lambda n: torch.zeros(n) * gaussian(n),
    "constant": lambda n: torch.full((n,), 2.5),
    "all negative": lambda n: -gaussian(n).abs(),
    "denormal": lambda n: gaussian(n) * 1e-42,
    "huge": lambda n: gaussian(n).clamp(-1, 1) * 3e38,
    "few levels": lambda n: (gaussian(n) * 2).round(),
    "ascending": lambda n: torch.arange(n, dtype=torch.float32),
    "descending": lambda n: -torch.arange(n, 0, -1, dtype=torch.float32),
    "one non-zero": one_nonzero,
    "sparse": lambda n: gaussian(n) * (gaussian(n, seed=1) > 2.5),
    "periodic": lambda n: gaussian(n) * (torch.arange(n) % 256 == 0),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
every_size = pytest.mark.parametrize("n", SIZES)


def floats(**kwargs):
    return st_numpy.arrays(
        np.float32, st.integers(0, 300), elements=st.floats(width=32, **kwargs), fill=st.nothing()
    ).map(torch.from_numpy)


def counts(n):
    return sorted({0, min(1, n), n // 1000, n // 100, n // 3, max(n - 1, 0), n})


def top_k(kernel, x, k):
    """The selection, after a check that nothing around the two buffers was touched."""
    capacity = kernel.top_k_capacity(x.numel(), k)
    indices, candidates = guarded(k), guarded(capacity)
    found = kernel.top_k(x, k, indices[8 : 8 + k], candidates[8 : 8 + capacity])
    assert_guards(indices, candidates)
    return None if found == -1 else indices[8 : 8 + found]


def guarded(n):
    return torch.full((n + 16,), GUARD, dtype=torch.int32)


def assert_guards(*buffers):
    for buffer in buffers:
        assert (buffer[:8] == GUARD).all()
        assert (buffer[-8:] == GUARD).all()


# --- all_finite


@both
@every_size
@pytest.mark.parametrize("bad", BROKEN)
def test_all_finite_finds_one_bad_element_anywhere(kernel, n, bad):
    x = gaussian(n)
    assert kernel.all_finite(x) is True
    for position in {0, n // 2, n - 1} if n else ():
        x[position] = bad
        assert kernel.all_finite(x) is False
        x[position] = 3.4e38
    assert kernel.all_finite(x) is True


# --- top_k


@every_shape
@every_size
def test_top_k_agrees(shape, n):
    x = shape(n)
    for k in counts(n):
        assert torch.equal(top_k(cpu, x, k), top_k(reference, x, k)), k


@settings(max_examples=60, deadline=None)
@given(x=floats(), data=st.data())
def test_top_k_agrees_on_anything(x, data):
    k = data.draw(st.integers(0, x.numel()))
    found, expected = top_k(cpu, x, k), top_k(reference, x, k)
    assert (found is None) == (expected is None) == (not x.isfinite().all())
    assert found is None or torch.equal(found, expected)


@both
@every_shape
def test_top_k_has_the_magnitudes_of_torch_topk(kernel, shape):
    x = shape(10_007)
    for k in (1, 100, 5_000):
        ours = x[top_k(kernel, x, k).long()].abs().sort().values
        assert torch.equal(ours, x.abs().topk(k).values.sort().values)


@both
def test_top_k_gives_ties_to_the_lowest_positions(kernel):
    x = torch.tensor([1.0, -2.0, 3.0, 2.0, 2.0, -0.0, 0.0])
    assert top_k(kernel, x, 3).tolist() == [1, 2, 3]
    assert top_k(kernel, x, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert top_k(kernel, torch.ones(100_003), 5).tolist() == [0, 1, 2, 3, 4]


def test_top_k_is_exact_when_the_guess_is_wrong():
    """The sample is drawn at fixed positions: what lies there, and only there, misleads it."""
    n, k = 400_000, 4_000
    width = cpu._sample_width(n, k, cpu.top_k_capacity(n, k) // 2)
    sampled = torch.tensor([int(cpu._place_drawn(i, width)) for i in range(n // width)])
    assert 1_000 < sampled.numel() < 2_000
    for inside, outside in ((100.0, 1.0), (0.0, 1.0)):  # guess too high: second pass; too low: overflow
        x = gaussian(n) * outside
        x[sampled] = gaussian(sampled.numel()) * inside
        assert torch.equal(top_k(cpu, x, k), top_k(reference, x, k))


def test_top_k_is_exact_when_the_scratch_overflows_again_and_again():
    x = torch.cat([torch.zeros(200_000), torch.arange(100_000.0)])[:, None].expand(-1, 3).reshape(-1)
    x[::256] = 0
    for k in (1, 10, 20_000, 300_001):
        assert torch.equal(top_k(cpu, x, k), top_k(reference, x, k))


@both
@pytest.mark.parametrize("bad", BROKEN)
@pytest.mark.parametrize("n", [n for n in SIZES if n])
def test_top_k_refuses_what_is_not_finite(kernel, n, bad):
    for position in {0, n // 2, n - 1}:
        x = gaussian(n)
        x[position] = bad
        assert all(top_k(kernel, x, k) is None for k in counts(n))


@both
def test_top_k_refuses_when_nothing_is_finite(kernel):
    x = torch.full((100_003,), math.nan)
    assert all(top_k(kernel, x, k) is None for k in counts(100_003))


@both
def test_top_k_says_which_buffer_is_too_short(kernel):
    x, ints = torch.ones(100), torch.empty(1000, dtype=torch.int32)
    with pytest.raises(ValueError, match="between 0 and 100"):
        kernel.top_k(x, 101, ints, ints)
    with pytest.raises(ValueError, match="indices holds 9"):
        kernel.top_k(x, 10, ints[:9], ints)
    with pytest.raises(ValueError, match="top_k_capacity"):
        kernel.top_k(x, 10, ints, ints[:100])


# --- above and abs_sums


def above(kernel, x, threshold, capacity):
    indices = guarded(capacity)
    count = kernel.above(x, threshold, indices[8 : 8 + capacity])
    assert_guards(indices)
    return count, indices[8 : 8 + min(count, capacity)].tolist()


THRESHOLDS = [-1.0, -1e-50, -0.0, 0.0, 1e-45, 0.1, 1.0, 2.5, 3e38, 1e39, math.inf]


@every_shape
@every_size
def test_above_agrees_and_stops_at_the_capacity(shape, n):
    x = shape(n)
    for threshold in (-1.0, 0.0, 1.0, 2.5):
        for capacity in {0, n // 10, n}:
            assert above(cpu, x, threshold, capacity) == above(reference, x, threshold, capacity)


@settings(max_examples=60, deadline=None)
@given(x=floats(), threshold=st.one_of(st.sampled_from(THRESHOLDS), st.floats(allow_nan=False)))
def test_above_and_abs_sums_agree_on_anything(x, threshold):
    assert above(cpu, x, threshold, 50) == above(reference, x, threshold, 50)
    assert_sums(cpu.abs_sums(x, threshold), reference.abs_sums(x, threshold))
    assert cpu.abs_sums(x, threshold)[0] == above(cpu, x, threshold, 0)[0]


@both
def test_above_is_strict_and_nan_is_above_everything(kernel):
    x = torch.tensor([0.0, 1.0, -1.0, 2.0, -math.inf, math.nan])
    assert above(kernel, x, 1.0, 6) == (3, [3, 4, 5])
    assert above(kernel, x, math.inf, 6) == (1, [5])
    assert above(kernel, x, -1.0, 2) == (6, [0, 1])


@both
def test_a_nan_threshold_is_an_error(kernel):
    with pytest.raises(ValueError, match="NaN"):
        kernel.above(torch.ones(3), math.nan, torch.empty(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="NaN"):
        kernel.abs_sums(torch.ones(3), math.nan)


def assert_sums(found, expected):
    assert found == pytest.approx(expected, rel=1e-12, abs=0, nan_ok=True)


@every_shape
@every_size
def test_abs_sums_agree(shape, n):
    x = shape(n)
    for threshold in THRESHOLDS:
        assert_sums(cpu.abs_sums(x, threshold), reference.abs_sums(x, threshold))


@every_shape
@every_size
def test_abs_log_sum_agrees(shape, n):
    x = shape(n)
    assert cpu.abs_log_sum(x) == pytest.approx(reference.abs_log_sum(x), abs=1e-5 * n + 1e-9)


@both
@pytest.mark.parametrize("bad", BROKEN)
def test_sums_are_finite_only_if_every_element_is(kernel, bad):
    x = torch.full((100_003,), -3e38)
    assert all(map(math.isfinite, kernel.abs_sums(x, 1.0)))
    for position in (0, 50_000, 100_002):
        broken = x.clone()
        broken[position] = bad
        assert not any(map(math.isfinite, kernel.abs_sums(broken, 1.0)[1:]))


# --- gather and scatter_add


def some_indices(n, seed=2):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: n // 3].sort().values.int()


@every_size
def test_gather_agrees(n):
    x, indices = gaussian(n), some_indices(n)
    values = torch.empty(indices.numel())
    cpu.gather(x, indices, values)
    assert torch.equal(values, x[indices.long()])
    reference.gather(x, indices, values.zero_())
    assert torch.equal(values, x[indices.long()])


@every_size
@pytest.mark.parametrize("scale", [1.0, -1.0, 0.1, 1e-40, 1 / 3])
def test_scatter_add_agrees_to_the_bit(n, scale):
    found, indices = gaussian(n), some_indices(n)
    expected, values = found.clone(), gaussian(indices.numel(), seed=3)
    oracle = found.numpy().copy()
    oracle[indices.numpy()] += np.float32(scale) * values.numpy()
    cpu.scatter_add(found, indices, values, scale)
    reference.scatter_add(expected, indices, values, scale)
    assert np.array_equal(found.numpy(), oracle)
    assert np.array_equal(expected.numpy(), oracle)


@both
@pytest.mark.parametrize(("value", "scale"), [*((bad, 1.0) for bad in BROKEN), (3e38, 2.0)])
def test_scatter_add_says_whether_what_it_wrote_is_finite(kernel, value, scale):
    acc, indices = gaussian(100), torch.tensor([3, 40, 99], dtype=torch.int32)
    acc[50] = math.nan  # which it does not touch
    assert kernel.scatter_add(acc, indices, torch.ones(3), scale)
    assert not kernel.scatter_add(acc, indices, torch.tensor([1.0, value, 1.0]), scale)
    acc[99] = math.inf
    assert not kernel.scatter_add(acc, indices[2:], torch.ones(1), scale)
    assert kernel.scatter_add(acc, indices[:0], torch.ones(0), scale)


@both
@pytest.mark.parametrize("index", [-1, 5, -(2**31), 2**31 - 1])
def test_an_index_out_of_range_is_an_error_and_writes_nothing(kernel, index):
    indices = torch.tensor([0, 4, index, 1], dtype=torch.int32)
    acc, values = torch.zeros(5), torch.ones(4)
    with pytest.raises(IndexError, match="the vector has 5 elements"):
        kernel.scatter_add(acc, indices, values, 1.0)
    with pytest.raises(IndexError, match=str(index)):
        kernel.gather(acc, indices, values)
    assert acc.sum() == 0
    assert values.sum() == 4


# --- the boundary


def test_kernels_refuse_memory_they_would_misread():
    ints = torch.empty(100, dtype=torch.int32)
    with pytest.raises(TypeError, match="float64"):
        cpu.all_finite(torch.ones(3, dtype=torch.float64))
    with pytest.raises(TypeError, match="strides"):
        cpu.above(torch.ones(6)[::2], 1.0, ints)
    with pytest.raises(TypeError, match=r"shape \(2, 3\)"):
        cpu.abs_sums(torch.ones(2, 3), 1.0)
    with pytest.raises(TypeError, match="int64"):
        cpu.gather(torch.ones(3), torch.zeros(1, dtype=torch.int64), torch.ones(1))


@both
def test_lengths_must_match(kernel):
    with pytest.raises(ValueError, match="2 indices but 3 values"):
        kernel.gather(torch.ones(3), torch.zeros(2, dtype=torch.int32), torch.ones(3))
