"""The range-based float: the paper's example, the numbers its codes stand for, rounding, both kernels bit for bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from support.cases import cases
from tersegrad.compressors import RangeFloat
from tersegrad.compressors.rangefloat import codes as range_float
from tersegrad.compressors.rangefloat.codes import Layout, fit, with_eps
from tersegrad.core import Payload, accumulate, pausing
from tersegrad.kernels.cpu import range_float as cpu
from tersegrad.kernels.ops import float_of, packed_nbytes
from tersegrad.kernels.reference import range_float as reference
from tersegrad.kernels.reference.bits import pack_bits, unpack_bits

both = cases(kernel=[cpu, reference])
both_roundings = cases(nearest=[False, True])
LAYOUTS = [
    fit(8, 3, -1.0, 1.0),
    fit(10, 5, -1.0, 1.0),
    fit(2, 0, -3.0, 3.0),
    fit(3, 1, -1.0, 1.0),
    fit(6, 2, -0.5, 2.0),
    fit(7, 3, 0.0, 1.0),
    fit(7, 3, -1e-3, 0.0),
    fit(16, 10, -1e30, 1e30),
    fit(10, 2, -1.0, 1.0),  # goes down to denormal numbers
    fit(12, 11, -1e-38, 1e-38),
    with_eps(8, 3, -2.0, 2.0, 0.125),
]
every_layout = cases(layout=LAYOUTS)


def best_mantissa(*arguments):
    return pausing.run(range_float.best_mantissa(*arguments))


def codes_of(x, layout, nearest=False, kernel=cpu):
    x = torch.as_tensor(x, dtype=torch.float32).reshape(-1)
    data = torch.empty(packed_nbytes(x.numel(), layout.bits), dtype=torch.uint8)
    assert kernel.range_encode(x, layout, nearest, data)
    codes = torch.empty(x.numel(), dtype=torch.int32)
    unpack_bits(data, layout.bits, codes)
    return codes


def values_of(codes, layout, kernel=cpu):
    codes = torch.as_tensor(codes, dtype=torch.int32).reshape(-1)
    data = torch.empty(packed_nbytes(codes.numel(), layout.bits), dtype=torch.uint8)
    pack_bits(codes, layout.bits, data)
    acc = torch.zeros(codes.numel())
    kernel.range_decode_add(data, layout, acc, 1.0)
    return acc


def through(x, layout, nearest, kernel=cpu):
    return values_of(codes_of(x, layout, nearest, kernel), layout, kernel)


def gaussian(n, scale=1.0, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


# --- the numbers


@both
def test_the_papers_example(kernel):
    layout = with_eps(8, 3, -2.0, 2.0, 0.125)
    assert (layout.base, layout.eps, layout.high, layout.low) == (992, 0.125, 2.0, -2.0)
    assert codes_of(0.256, layout, kernel=kernel).tolist() == [9]
    assert values_of(9, layout, kernel).tolist() == [0.25]


@cases(
    "bits mantissa eps",
    [
        *[(8, 2, 3.49e-10), (8, 3, 1.91e-5), (8, 4, 4.39e-3), (8, 5, 6.64e-2), (8, 6, 0.258), (8, 7, 0.508)],
        *[(10, 3, 6.8e-20), (10, 4, 2.6e-10), (10, 5, 1.62e-5), (10, 6, 4.03e-3), (10, 7, 6.35e-2), (10, 8, 0.252)],
    ],
)
def test_balanced_eps(bits, mantissa, eps):
    layout = fit(bits, mantissa, -1.0, 1.0)
    assert layout.eps == pytest.approx(eps, rel=0.02)
    assert layout.positives == layout.negatives == 2 ** (bits - 1) - 1
    assert (layout.low, layout.high) == (-1.0, 1.0)


def test_a_range_deeper_than_float32_leaves_codes_unused():
    layout = fit(10, 2, -1.0, 1.0)
    assert layout.positives < 511
    assert 0 < layout.eps < 2.0**-126  # the smallest normal number


@cases("low high", [(-1.0, 1.0), (-0.5, 2.0), (-1e-4, 3.0), (0.0, 1.0), (-7.0, 0.0), (-1e-30, 1.0)])
@cases(bits=[2, 3, 5, 8, 10, 16])
def test_the_smallest_eps_that_fits(low, high, bits):
    for mantissa in range(bits):
        layout = fit(bits, mantissa, low, high)
        assert layout.positives + layout.negatives < 1 << bits
        assert layout.positives == 0 or high * (1 - 2.0**-mantissa) < layout.high <= np.float32(high)
        assert layout.negatives == 0 or low * (1 - 2.0**-mantissa) > layout.low >= np.float32(low)
        if layout.base > 1:  # one step less needs more codes than there are
            with pytest.raises(ValueError, match="not a range"):
                with_eps(bits, mantissa, low, high, float_of(layout.base - 1 << layout.shift))


@both
@every_layout
def test_codes_count_up_from_zero_on_both_sides(layout, kernel):
    positive = values_of(range(layout.positives + 1), layout, kernel)
    negative = values_of([0, *range(layout.positives + 1, layout.positives + layout.negatives + 1)], layout, kernel)
    for side, end in ((positive, layout.high), (-negative, -layout.low)):
        assert side[0] == 0
        assert bool((side[1:].view(torch.int32) > side[:-1].view(torch.int32)).all())
        assert side[-1] == end
        assert len(side) == 1 or side[1] == layout.eps
    shared = min(layout.positives, layout.negatives) + 1
    assert torch.equal(positive[:shared], -negative[:shared])


@both
@both_roundings
@every_layout
def test_every_code_comes_back(layout, nearest, kernel):
    codes = torch.arange(layout.positives + layout.negatives + 1, dtype=torch.int32)
    assert torch.equal(codes_of(values_of(codes, layout, kernel), layout, nearest, kernel), codes)


def test_steps_double_every_power_of_two():
    layout = fit(10, 5, -1.0, 1.0)
    steps = values_of(range(1, layout.positives + 1), layout).double().diff()
    assert bool((steps[32:] == 2 * steps[:-32]).all())


def test_unused_codes_are_read_as_the_last():
    layout = fit(8, 3, -2.0, 2.0)
    assert values_of([254, 255], layout).tolist() == [-2.0, -2.0]
    assert values_of(7, Layout(3, 0, 1, 0, 0)).tolist() == [0.0]


# --- rounding


@both
@every_layout
@both_roundings
def test_rounding_against_all_the_numbers_there_are(layout, nearest, kernel):
    numbers = values_of(range(layout.positives + layout.negatives + 1), layout).double()
    numbers = np.unique(numbers.numpy())
    end = max(-layout.low, layout.high)
    x = np.float32(end) * np.concatenate([np.linspace(-1.2, 1.2, 4001), np.logspace(-12, 0, 500)]).astype(np.float32)
    got = through(x, layout, nearest, kernel).double().numpy()
    inside = np.clip(x.astype(np.float64), numbers[0], numbers[-1])
    down = numbers[np.clip(np.searchsorted(numbers, inside, "right") - 1, 0, None)]
    up = numbers[np.clip(np.searchsorted(numbers, inside, "left"), None, len(numbers) - 1)]
    if nearest:
        assert np.array_equal(np.abs(inside - got), np.minimum(inside - down, up - inside))
    else:
        assert np.array_equal(got, np.where(inside >= 0, down, up))


@cases("bits mantissa", [(8, 3), (10, 5), (10, 6), (16, 11), (4, 1)])
def test_relative_error(bits, mantissa):
    layout = fit(bits, mantissa, -1.0, 1.0)
    x = gaussian(100_000, 0.2).clamp(-1, 1)
    x = x[x.abs() >= layout.eps].double()
    cut, rounded = (through(x, layout, nearest).double() for nearest in (False, True))
    assert float(((x - cut).abs() / x.abs()).max()) < 2.0**-mantissa
    assert bool((cut.abs() <= x.abs()).all())
    assert float(((x - rounded).abs() / x.abs()).max()) <= 2.0 ** -(mantissa + 1)


@both_roundings
def test_below_eps(nearest):
    layout = with_eps(8, 3, -2.0, 2.0, 0.125)
    just_below = float(np.nextafter(np.float32(0.125), np.float32(0)))
    halfway_below = float(np.nextafter(np.float32(0.0625), np.float32(0)))
    small = [0.0, -0.0, 1e-45, halfway_below, -halfway_below]
    assert through(small, layout, nearest).tolist() == [0.0] * 5
    nearer = 0.125 if nearest else 0.0
    assert through([0.0625, just_below, -just_below], layout, nearest).tolist() == [nearer, nearer, -nearer]


@both_roundings
def test_clipping(nearest):
    layout = fit(8, 3, -0.5, 2.0)
    huge = torch.finfo(torch.float32).max
    assert through([2.0, 2.1, huge, -0.5, -0.6, -huge], layout, nearest).tolist() == [2.0] * 3 + [-0.5] * 3
    assert through([-1.0, 1.0], fit(8, 3, 0.0, 1.0), nearest).tolist() == [0.0, 1.0]


def test_the_end_of_the_range_is_rounded_with_the_rest():
    assert fit(8, 3, -1.99, 1.99).high == 1.875
    assert fit(8, 3, -1.99, 1.99, nearest=True).high == 2.0
    largest = torch.finfo(torch.float32).max
    assert fit(8, 3, -largest, largest, nearest=True).high < math.inf


@cases(
    "bits mantissa sigma cut rounded",
    [
        *[(10, 5, 0.03, 0.0131, 0.0066), (8, 3, 0.1, 0.0509, 0.0265), (8, 3, 0.003, 0.0508, 0.0264)],
        *[(8, 4, 0.01, 0.148, None), (10, 6, 0.003, 0.620, None)],  # many are below eps: nearest is not the table's
    ],
)
def test_relative_error_of_gaussian_vectors(bits, mantissa, sigma, cut, rounded):
    x = gaussian(400_000, sigma)
    layout = fit(bits, mantissa, -1.0, 1.0)
    errors = [float((through(x, layout, nearest) - x).norm() / x.norm()) for nearest in (False, True)]
    assert errors[0] == pytest.approx(cut, rel=0.02)
    assert errors[1] == pytest.approx(rounded, rel=0.02) if rounded else errors[1] < 0.65 * errors[0]


# --- kernels


ends = st.floats(0, 2.0**127, width=32)
layouts = st.tuples(st.integers(2, 16), st.integers(0, 15), ends, ends)


@settings(max_examples=150, deadline=None)
@given(
    layouts,
    st.booleans(),
    st_numpy.arrays(
        np.float32,
        st.integers(0, 1200),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
)
def test_the_kernel_is_the_reference_bit_for_bit(numbers, nearest, x):
    bits, mantissa, low, high = numbers
    layout = fit(bits, mantissa % bits, -low, high, nearest)
    x = torch.from_numpy(x)
    data = [torch.empty(packed_nbytes(x.numel(), bits), dtype=torch.uint8) for _ in range(2)]
    assert all(k.range_encode(x, layout, nearest, d) for k, d in zip((cpu, reference), data, strict=True))
    assert torch.equal(*data)
    sums = [gaussian(x.numel()), gaussian(x.numel())]
    for kernel, acc in zip((cpu, reference), sums, strict=True):
        kernel.range_decode_add(data[0], layout, acc, 0.3)
    assert torch.equal(sums[0].view(torch.int32), sums[1].view(torch.int32))


@settings(max_examples=50, deadline=None)
@given(layouts, st.integers(0, 1200), st.integers(0, 2**32))
def test_any_codes_decode_alike_and_finite(numbers, n, seed):
    bits, mantissa, low, high = numbers
    layout = fit(bits, mantissa % bits, -low, high)
    data = np.random.default_rng(seed).integers(0, 256, packed_nbytes(n, bits), dtype=np.uint8)
    sums = [torch.zeros(n), torch.zeros(n)]
    for kernel, acc in zip((cpu, reference), sums, strict=True):
        kernel.range_decode_add(torch.from_numpy(data), layout, acc, 1.0)
    assert torch.equal(*sums)
    assert bool(sums[0].isfinite().all())


@both
@cases(bad=[math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(kernel, bad):
    layout = fit(8, 3, -1.0, 1.0)
    for n in (1, 512, 1000):
        for where in (0, n // 2, n - 1):
            x = gaussian(n)
            x[where] = bad
            assert not math.isfinite(kernel.abs_max(x))
            assert not kernel.range_encode(x, layout, True, torch.empty(n, dtype=torch.uint8))


@both
def test_abs_max(kernel):
    assert kernel.abs_max(torch.zeros(0)) == 0.0
    assert kernel.abs_max(torch.tensor([-3.0, 2.0])) == 3.0
    assert kernel.abs_max(torch.tensor([-0.0, 1e-45])) == float(np.float32(1e-45))
    x = gaussian(100_003)
    assert kernel.abs_max(x) == float(x.abs().max())


# --- bytes


@cases(bits=range(2, 17))
def test_bytes_decode_with_no_other_knowledge(bits):
    for n in (0, 1, 7, 1000):
        x = gaussian(n)
        layout = fit(bits, bits // 2, -0.5, 2.0)
        data = torch.empty(packed_nbytes(n, bits), dtype=torch.uint8)
        assert data.numel() == math.ceil(n * bits / 8)
        assert range_float.encode(x, layout, True, data)
        meta = range_float.layout_meta(layout)
        assert len(meta) == 9
        assert range_float.read_layout(meta, bits) == layout
        acc = torch.ones(n)
        range_float.decode_add(range_float.read_layout(meta, bits), data, acc, 2.0)
        assert torch.equal(acc, 1 + 2 * through(x, layout, True))


@cases(
    header=[
        (0, 10, 10, 3),  # eps would be zero
        (890, 128, 128, 3),  # more codes than 8 bits have
        (890, 127, 127, 8),  # a mantissa longer than a code
        (890, 127, 127, 255),
        (2030, 127, 127, 3),  # reaches infinity
        (2**32 - 1, 1, 1, 3),
    ]
)
def test_a_layout_that_cannot_be_is_refused_before_anything_is_added(header):
    payload = Payload(torch.zeros(10, dtype=torch.uint8), 10, range_float.HEADER.pack(*header))
    acc = torch.ones(10)
    with pytest.raises(ValueError, match="not a range"):
        accumulate(RangeFloat(8), payload, acc)
    assert bool((acc == 1).all())


def test_a_wrong_length_is_refused():
    layout = fit(8, 3, -1.0, 1.0)
    with pytest.raises(ValueError, match="10 range floats of 8 bits take 10 bytes, got 9"):
        range_float.decode_add(layout, torch.zeros(9, dtype=torch.uint8), torch.zeros(10), 1.0)
    for meta in (range_float.layout_meta(layout)[:-1], range_float.layout_meta(layout) + b"\0", b""):
        with pytest.raises(ValueError, match=f"takes 9 bytes, got {len(meta)}"):
            range_float.read_layout(meta, 8)


# --- the choice of the mantissa


@cases(bits=[4, 8, 10])
@cases(spread=[1.0, 30.0, 1e4])
def test_the_mantissa_with_the_smallest_error(bits, spread):
    x = gaussian(100_000)
    x[:3] *= spread
    end = float(x.abs().max())
    errors = [float((through(x, fit(bits, m, -end, end, True), True) - x).norm()) for m in range(bits)]
    chosen = best_mantissa(x, bits, -end, end, True)
    assert errors[chosen] <= 1.05 * min(errors)


def test_tiny_and_huge_vectors_are_compared_too():
    """Their squares are beyond float32."""
    x = gaussian(10_000)
    end = float(x.abs().max())
    expected = best_mantissa(x, 8, -end, end, True)
    for scale in (2.0**-100, 2.0**100):
        assert best_mantissa(x * scale, 8, -end * scale, end * scale, True) == expected
