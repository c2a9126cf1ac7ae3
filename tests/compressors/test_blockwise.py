"""Blockwise: the largest of a block exact, all others near, exact sizes."""

import math

import pytest
import torch

from tersegrad.compressors import Blockwise
from tersegrad.core import HEADER_NBYTES, Payload, accumulate, sections
from tersegrad.engine.roundtrip import roundtrip


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [1, 100, 2048])
def test_the_largest_of_a_block_is_exact_and_no_other_is_far_off(block):
    x = gaussian(10_000)
    decoded, _ = roundtrip(Blockwise(block), x)
    for part, got in zip(x.split(block), decoded.split(block), strict=True):
        where = int(part.abs().argmax())
        assert got[where] == part[where]
        assert float((got - part).abs().max()) <= 0.00704 * float(part[where].abs())
        assert bool(((got - part).abs() <= part.abs()).all())


def test_small_elements_keep_their_magnitude():
    """That is what the map is for: seven powers of ten, where eight linear bits have two."""
    x = 10.0 ** -torch.arange(0, 6.5, 0.01)
    decoded, _ = roundtrip(Blockwise(), x)
    error = (decoded - x).abs()
    for zeros in range(7):  # 2^(6 - zeros) steps between these two powers of ten
        inside = (x > 10.0 ** -(zeros + 1)) & (x <= 10.0**-zeros)
        half_a_step = 0.45 / 2 ** (6 - zeros) * 10.0**-zeros
        assert float(error[inside].max()) <= half_a_step * (1 + 1e-5)
        assert bool((decoded[inside] > 0).all()) or zeros == 6


def test_one_large_element_spoils_its_own_block_only():
    x = gaussian(4096)
    clean, _ = roundtrip(Blockwise(), x)
    x[5] = 1e6
    spoilt, _ = roundtrip(Blockwise(), x)
    assert torch.equal(spoilt[2048:], clean[2048:])
    assert not torch.equal(spoilt[:2048], clean[:2048])


def test_constant_and_zero_blocks_are_exact():
    x = torch.cat([torch.full((2048,), -0.3), torch.zeros(2048), torch.full((5,), 7e37)])
    assert torch.equal(roundtrip(Blockwise(), x)[0], x)


@pytest.mark.parametrize(("n", "block"), [(0, 2048), (1, 2048), (2048, 2048), (2049, 2048), (1000, 7)])
def test_size_is_exact(n, block):
    spec = Blockwise(block)
    _, payload = roundtrip(spec, gaussian(n))
    assert payload.nbytes == HEADER_NBYTES + 4 * math.ceil(n / block) + n
    assert sections(spec, payload) == {"scales": 4 * math.ceil(n / block), "codes": n}


def test_it_is_deterministic():
    x = gaussian(5000)
    assert torch.equal(roundtrip(Blockwise(), x)[1].body, roundtrip(Blockwise(), x.clone())[1].body)


def test_a_scale_that_cannot_be_is_refused_before_anything_is_added():
    _, payload = roundtrip(Blockwise(), gaussian(10))
    body = payload.body.clone()
    body[:4] = torch.tensor([math.inf]).view(torch.uint8)
    acc = torch.ones(10)
    with pytest.raises(ValueError, match="not finite"):
        accumulate(Blockwise(), Payload(body, 10), acc)
    assert bool((acc == 1).all())


@pytest.mark.parametrize("block", [0, -1, 2.5, True])
def test_refusals(block):
    with pytest.raises(ValueError, match=r"one element or more. The usual is 2048"):
        Blockwise(block)
