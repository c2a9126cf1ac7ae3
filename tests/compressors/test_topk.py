"""TopK: exactly the largest, ties to the lowest positions, and bytes that can be checked by hand."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.cases import cases
from tersegrad import BF16, TopK, roundtrip
from tersegrad.core import HEADER_NBYTES, Layout, Payload, Sum, accumulate, encode, sections, state, subtract
from tersegrad.engine.roundtrip import decode


def largest(x, k):
    """x at its k largest magnitudes, of equal ones those at the lowest positions; written with numpy."""
    order = np.lexsort((np.arange(len(x)), -np.abs(x)))[:k]
    kept = np.zeros_like(x)
    kept[order] = x[order]
    return kept


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_ties_go_to_the_lowest_positions(levels, ratio):
    x = np.array(levels, dtype=np.float32)
    k = max(1, round(ratio * len(x)))
    decoded, payload = roundtrip(TopK(ratio), torch.from_numpy(x))
    assert np.array_equal(decoded.numpy(), largest(x, k))
    assert struct.unpack_from("<I", payload.meta)[0] == k  # zeros are sent too, if there is nothing else


@cases(n=[1, 2, 99, 1000, 100_003], ratio=[1e-6, 0.01, 0.5, 1.0])
def test_the_k_largest_bit_for_bit(n, ratio):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 10.0 ** torch.linspace(-20, 20, n)
    decoded, _ = roundtrip(TopK(ratio), x)
    assert np.array_equal(decoded.numpy(), largest(x.numpy(), max(1, round(ratio * n))))


def test_a_constant_vector_sends_its_first_elements():
    decoded, _ = roundtrip(TopK(0.01), torch.full((1000,), -0.25))
    assert decoded.tolist() == [-0.25] * 10 + [0.0] * 990


def test_what_is_not_sent_is_left_bit_for_bit():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before, compressor = x.clone(), TopK(0.1)
    memory = compressor.init(Layout.flat(1000), 0)
    payload = compressor.encode(x, memory)
    assert torch.equal(x, before)
    subtract(compressor, payload, x, memory)
    assert torch.equal(x, before - torch.from_numpy(largest(before.numpy(), 100)))


def test_a_sum_is_selected_as_if_it_had_been_added_before():
    a, b = torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    compressor, total = TopK(0.02), torch.empty(5000)
    together = encode(compressor, Sum(a, b, total), compressor.init(Layout.flat(5000), 0))
    before = compressor.encode(a + b, compressor.init(Layout.flat(5000), 0))
    assert torch.equal(total, a + b)
    assert (together.meta, together.body.tolist()) == (before.meta, before.body.tolist())


def test_values_are_rounded_by_their_codec_after_the_selection():
    x = torch.tensor([1.0001, -3.0003, 0.5, 2.0002])
    decoded, payload = roundtrip(TopK(0.5, values=BF16()), x)
    assert decoded.tolist() == [0.0, -3.0, 0.0, 2.0]
    assert sections(TopK(0.5, values=BF16()), payload)["values"] == 2 * 2


def test_bytes_are_those_of_the_format():
    """Meta: 2 positions, a bitmap (form 1) of 2 bytes. Body: the bitmap, filled up to 8 bytes, and two floats."""
    x = torch.zeros(16)
    x[3], x[9] = 5.0, -7.0
    _, payload = roundtrip(TopK(0.125), x)
    count, form, nbytes = struct.unpack("<IBxxxQ", payload.meta)
    assert count == 2
    assert payload.body[8 * math.ceil(nbytes / 8) :].view(torch.float32).tolist() == [5.0, -7.0]
    assert (form, bytes(payload.body[:2].tolist())) == (1, bytes([1 << 3, 1 << 1]))
    assert payload.nbytes == HEADER_NBYTES + 16 + 8 + 8


def test_what_was_sent_is_reported():
    compressor = TopK(0.01)
    memory = compressor.init(Layout.flat(1000), 0)
    compressor.encode(torch.ones(1000), memory)
    assert list(state.reports(memory)) == [{"sent": 10, "of": 1000}]


@cases(bad=[math.nan, math.inf, -math.inf], where=[0, 613, 999])
def test_what_is_not_finite_is_seen_wherever_it_is(bad, where):
    x = torch.zeros(1000)
    x[where] = bad
    compressor = TopK(0.001)
    memory = compressor.init(Layout.flat(1000), 0)
    payload = compressor.encode(x, memory)
    assert not payload.finite
    assert bool(decode(compressor, payload, memory).isnan().all())


@cases(
    "meta says",
    [
        (b"", "at least 16 bytes of meta, got 0"),
        (struct.pack("<IBxxxQ", 11, 1, 2), "for 10 positions announces 11 of them"),
        (struct.pack("<IBxxxQ", 2, 1, 1 << 40), "bytes of indices"),
        (struct.pack("<IBxxxQ", 2, 9, 2), "got form 9"),
        (struct.pack("<IBxxxQ", 3, 1, 2), "bits set"),
    ],
)
def test_meta_that_cannot_be_is_refused_before_anything_is_added(meta, says):
    x = torch.arange(10.0)
    _, payload = roundtrip(TopK(0.2), x)
    acc = torch.ones(10)
    with pytest.raises(ValueError, match=says):
        accumulate(TopK(0.2), Payload(payload.body, 10, meta), acc)
    assert bool((acc == 1).all())
