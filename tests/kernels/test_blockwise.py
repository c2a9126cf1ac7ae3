"""The dynamic 8-bit map: its numbers, both kernels bit for bit, and always the nearest."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from support.backends import every, others, reference
from support.cases import cases
from tersegrad.kernels.ops import dynamic_borders, dynamic_map

OPS = "block_scales", "blockwise_encode", "blockwise_decode_add"
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def encoded(kernel, x, block):
    scales = torch.full((-(-x.numel() // block) + 4,), 77.0)
    assert kernel.block_scales(x, block, scales[:-4])
    assert scales[-4:].tolist() == [77.0] * 4
    out = torch.full((x.numel() + 40,), 77, dtype=torch.uint8)
    kernel.blockwise_encode(x, scales[:-4], block, out[:-40])
    assert bool((out[-40:] == 77).all())
    return scales[:-4], out[:-40]


def test_the_map_is_what_was_published():
    """Sign, zeros that count powers of ten, a one, and a fraction that is linear: read bit by bit here."""
    values = {0.0, 1.0}
    for code in range(1, 128):
        bits = f"{code:07b}"
        zeros = bits.index("1")
        fraction = bits[zeros + 1 :]
        linear = (int(fraction, 2) + 0.5) / 2 ** len(fraction) if fraction else 0.5
        values |= {sign * (0.1 + 0.9 * linear) * 10.0**-zeros for sign in (-1, 1)}
    found = dynamic_map()
    assert found.tolist() == pytest.approx(sorted(values), rel=1e-12)
    assert bool((found.diff() > 0).all())
    assert found.numel() == 256


def assert_agrees(kernel, x, block):
    (scales, codes), (their_scales, their_codes) = (encoded(each, x, block) for each in (kernel, reference))
    assert torch.equal(scales, their_scales)
    assert torch.equal(codes, their_codes)
    sums = [gaussian(x.numel()), gaussian(x.numel())]
    for each, acc in zip((kernel, reference), sums, strict=True):
        each.blockwise_decode_add(codes, scales, block, acc, 0.3)
    assert torch.equal(sums[0].view(torch.int32), sums[1].view(torch.int32))
    assert bool(sums[0].isfinite().all())


@others(*OPS)
@settings(max_examples=100, deadline=None)
@given(st_numpy.arrays(np.float32, st.integers(0, 3000), elements=FLOATS), st.sampled_from([1, 7, 100, 1024, 2048]))
def test_the_kernel_is_the_reference_bit_for_bit(kernel, x, block):
    assert_agrees(kernel, torch.from_numpy(x), block)


@others(*OPS)
def test_long_vectors(kernel):
    assert_agrees(kernel, gaussian((1 << 20) + 13), 2048)


@every(*OPS)
def test_around_every_border_of_the_map(kernel):
    """The numbers next to each border on both sides, where one search too little would show."""
    borders = dynamic_borders().numpy()
    near = np.concatenate([np.nextafter(borders, np.float32(0)), borders, np.nextafter(borders, np.float32(2))])
    x = torch.from_numpy(np.concatenate([[np.float32(1)], near, -near]).astype(np.float32))
    codes = encoded(kernel, x, x.numel())[1].numpy()[1:].astype(int)
    n = borders.size
    up = np.arange(1, n + 1)
    assert np.array_equal(codes[: 3 * n], 127 + np.concatenate([up - 1, up, up]))
    down = np.minimum(np.concatenate([up - 1, up, up]), 127)  # there is no minus one
    assert np.array_equal(codes[3 * n :], 127 - down)


@every(*OPS)
@cases(sign=[1.0, -1.0])
def test_every_element_gets_the_nearest_number(kernel, sign):
    x = torch.cat([gaussian(3000) * 10.0 ** (-7 * torch.rand(3000, generator=torch.Generator().manual_seed(1)))])
    x[17] = 5.0 * sign
    scales, codes = encoded(kernel, x, 3000)
    assert scales.tolist() == [5.0 * sign]
    values = dynamic_map()
    quotients = x.double() / scales.double()
    best = (quotients.unsqueeze(1) - values).abs().amin(1)
    got = (quotients - values[codes.long()]).abs()
    assert float((got - best).max()) < 2.0**-23  # two as near as that are equally good
    assert codes[17] == 255  # the largest is exact, whatever its sign


@every(*OPS)
def test_every_number_of_the_map_is_its_own_code(kernel):
    x = torch.cat([torch.ones(1), dynamic_map().float()]) * 3
    assert encoded(kernel, x, 257)[1].tolist() == [255, *range(256)]


@every(*OPS)
def test_scales(kernel):
    x = torch.tensor([1.0, -3.0, 2.0, 2.0, -2.0, 0.0, 0.0, 1e-40])
    assert encoded(kernel, x, 3)[0].tolist() == [-3.0, 2.0, 0.0]  # of two as large, the positive one
    assert encoded(kernel, torch.full((3,), 1e-40), 3)[1].tolist() == [127] * 3


@every(*OPS)
@cases(bad=[math.nan, math.inf, -math.inf, -math.nan])
def test_what_is_not_finite_is_seen(kernel, bad):
    for where in (0, 511, 512, 999):
        x = gaussian(1000)
        x[where] = bad
        assert not kernel.block_scales(x, 512, torch.empty(2))


@every(*OPS)
def test_refusals(kernel):
    with pytest.raises(ValueError, match="10 codes take 10 bytes, not 9"):
        kernel.blockwise_encode(torch.zeros(10), torch.zeros(1), 10, torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(ValueError, match="10 elements in buckets of 4 do not have 2 scales"):
        kernel.block_scales(torch.zeros(10), 4, torch.zeros(2))
