"""PerTensor: the same as its inner compressor on each tensor, whatever domain that one sums in."""

import numpy as np
import pytest
import torch

from support.cases import cases
from tersegrad import FFT, Identity, PerTensor, TopK
from tersegrad.core import HEADER_NBYTES, Layout, Payload, accumulate, adds_in_place, decode_sum, sections, subtract
from tersegrad.engine.roundtrip import decode
from tersegrad.testing import compressors, inputs

LAYOUT = Layout(("a", "b", "c", "d"), ((7,), (6, 20), (3, 5, 3, 3), (1,)))  # two of them odd
X = inputs.laplace(LAYOUT.numel)(0, 0)
every_inner = cases(inner=[TopK(0.2), FFT(0.5), FFT(0.0, values=Identity())])


def encoded(inner, x=X, bucket=LAYOUT):
    compressor = PerTensor(inner)
    state = compressor.init(bucket, 0)
    return compressor, compressor.encode(x, state), state


@every_inner
def test_every_tensor_is_treated_by_itself(inner):
    compressor, payload, state = encoded(inner)
    got = decode(compressor, payload, state).split(LAYOUT.sizes)
    rest = X.clone()
    subtract(compressor, payload, rest, state)
    for i, (piece, decoded, left) in enumerate(zip(X.split(LAYOUT.sizes), got, rest.split(LAYOUT.sizes), strict=True)):
        alone = inner.init(LAYOUT.subset([i]), 0)
        expected = decode(inner, inner.encode(piece, alone), alone)
        assert torch.equal(decoded, expected)
        assert torch.equal(left, piece - expected)


@every_inner
def test_tensors_of_other_lengths_are_refused(inner):
    compressor, payload, _ = encoded(inner)
    numel = LAYOUT.numel
    other = compressor.init(Layout(LAYOUT.names, ((7,), (20, 6), (45,), (120,))), 0)
    swapped = compressor.init(Layout(LAYOUT.names, (LAYOUT.shapes[1], LAYOUT.shapes[0], *LAYOUT.shapes[2:])), 0)
    for wrong, out in ((other, torch.zeros(292)), (swapped, torch.zeros(numel))):
        with pytest.raises(ValueError, match=rf"payload of {numel} elements in 4 tensors, and {out.numel()} in 4"):
            decode_sum(compressor, [payload], 1.0, out, wrong)
        with pytest.raises(ValueError, match="of other lengths"):
            subtract(compressor, payload, out, wrong)
        assert not bool(out.any())


def test_an_accumulator_of_another_length_is_refused():
    compressor, payload, _ = encoded(TopK(0.2))
    for wrong in (LAYOUT.numel - 1, LAYOUT.numel + 1):
        with pytest.raises(ValueError, match=f"needs an accumulator of {LAYOUT.numel}, and this one has {wrong}"):
            accumulate(compressor, payload, torch.zeros(wrong))


def test_sums_are_made_in_the_vector_itself_where_they_fit():
    """A tensor of odd length has a spectrum that is longer: only that one needs scratch."""
    compressor, payload, _ = encoded(FFT(0.5))
    state = compressor.init(LAYOUT, 0)
    decode_sum(compressor, [payload], 1.0, torch.empty(LAYOUT.numel), state)
    needs_scratch = {name: "_domain" in state["parts"][f"tensor {name}"]["inner"] for name in LAYOUT.names}
    assert needs_scratch == {"a": True, "b": False, "c": True, "d": True}


@every_inner
def test_scales_and_sums(inner):
    compressor, payload, state = encoded(inner)
    once = decode(compressor, payload, state)
    out = torch.full((LAYOUT.numel,), 77.0)
    for scale in (0.5, -0.25):
        decode_sum(compressor, [payload] * 3, scale, out, state)
        assert torch.allclose(out, 3 * scale * once, atol=1e-6)
    if adds_in_place(compressor):
        acc = torch.zeros(LAYOUT.numel)
        for scale in (0.5, 0.25, -1.0):
            accumulate(compressor, payload, acc, scale)
        assert torch.allclose(acc, -0.25 * once, atol=1e-6)


@every_inner
def test_what_is_not_finite_reaches_every_tensor(inner):
    x = X.clone()
    x[-1] = float("inf")
    compressor, payload, state = encoded(inner, x)
    assert not payload.finite
    assert bool(decode(compressor, payload, state).isnan().all())
    subtract(compressor, payload, x, state)
    assert bool(x.isnan().all())


@every_inner
def test_bytes_are_accounted_for(inner):
    compressor, payload, _ = encoded(inner)
    found = sections(compressor, payload)
    assert sum(found.values()) == payload.nbytes - HEADER_NBYTES
    assert found["tensors"] >= 8 + 17 * len(LAYOUT.names)  # 24 bytes each, less the padding of its meta
    assert sections(compressor, Payload(payload.body[:0], LAYOUT.numel, finite=False)) == {}


@every_inner
def test_bytes_that_were_tampered_with(inner):
    rng = np.random.default_rng(3)
    compressor, payload, state = encoded(inner)
    good = Payload(payload.body.clone(), payload.numel, payload.meta)
    refused, guard = 0, 32
    for _ in range(200):
        big = torch.zeros(LAYOUT.numel + 2 * guard)
        try:
            decode_sum(compressor, [compressors.hostile(good, rng)], 1.0, big[guard:-guard], state)
        except ValueError:
            refused += 1
        assert not bool(big[:guard].any() | big[-guard:].any())
    assert 0 < refused < 200
