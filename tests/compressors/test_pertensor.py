"""PerTensor: the same as its inner compressor on each tensor, whatever domain that one sums in."""

import numpy as np
import pytest
import torch

from support import laws
from tersegrad import FFT, Identity, PerTensor, TopK
from tersegrad.core import Bucket, Payload
from tersegrad.engine.roundtrip import decode

BUCKET = Bucket(("a", "b", "c", "d"), ((7,), (6, 20), (3, 5, 3, 3), (1,)))  # two of them odd
X = laws.laplace(BUCKET.numel)(0, 0)
every_inner = pytest.mark.parametrize("inner", [TopK(0.2), FFT(0.5), FFT(0.0, values=Identity())], ids=repr)


def encoded(inner, x=X, bucket=BUCKET):
    compressor = PerTensor(inner)
    state = compressor.init(bucket, 0)
    return compressor, compressor.encode(x, state), state


@every_inner
def test_every_tensor_is_treated_by_itself(inner):
    compressor, payload, state = encoded(inner)
    got = decode(compressor, payload, state).split(BUCKET.sizes)
    rest = X.clone()
    compressor.remove(payload, rest, state)
    for i, (piece, decoded, left) in enumerate(zip(X.split(BUCKET.sizes), got, rest.split(BUCKET.sizes), strict=True)):
        alone = inner.init(BUCKET.subset([i]), 0)
        expected = decode(inner, inner.encode(piece, alone), alone)
        assert torch.equal(decoded, expected)
        assert torch.equal(left, piece - expected)


@every_inner
def test_the_accumulator_is_as_long_as_all_tensors_ask_for(inner):
    compressor, payload, state = encoded(inner)
    needed = sum(inner.accumulator_numel(size) for size in BUCKET.sizes)
    acc = compressor.accumulator(torch.empty(BUCKET.numel), state)
    assert acc.numel() == needed
    for wrong in (needed - 1, needed + 1):
        with pytest.raises(ValueError, match=f"needs an accumulator of {needed}, and this one has {wrong}"):
            compressor.accumulate(payload, torch.zeros(wrong))


def test_sums_are_made_in_the_vector_itself_where_they_fit():
    even = Bucket(("a", "b"), ((6, 20), (30,)))
    for inner, bucket, inside in ((TopK(0.2), BUCKET, True), (FFT(), even, True), (FFT(), BUCKET, False)):
        compressor = PerTensor(inner)
        out = torch.empty(bucket.numel)
        acc = compressor.accumulator(out, compressor.init(bucket, 0))
        assert (acc.data_ptr() == out.data_ptr()) == inside


@every_inner
def test_scales_and_sums(inner):
    compressor, payload, state = encoded(inner)
    once = decode(compressor, payload, state)
    out = torch.empty(BUCKET.numel)
    acc = compressor.accumulator(out, state)
    for scale in (0.5, 0.25, -1.0):
        compressor.accumulate(payload, acc, scale)
    compressor.finish(acc, out, state)
    assert torch.allclose(out, -0.25 * once, atol=1e-6)


@every_inner
def test_what_is_not_finite_reaches_every_tensor(inner):
    x = X.clone()
    x[-1] = float("inf")
    compressor, payload, state = encoded(inner, x)
    assert not payload.finite
    assert bool(decode(compressor, payload, state).isnan().all())
    compressor.remove(payload, x, state)
    assert bool(x.isnan().all())


@every_inner
def test_bytes_are_accounted_for(inner):
    compressor, payload, _ = encoded(inner)
    sections = compressor.sections(payload)
    assert sum(sections.values()) == payload.body.numel()
    assert sections["tensors"] >= 8 + 16 * len(BUCKET.names)
    assert compressor.sections(Payload(payload.body[:0], BUCKET.numel, finite=False)) == {}


@every_inner
def test_bytes_that_were_tampered_with(inner):
    rng = np.random.default_rng(3)
    compressor, payload, state = encoded(inner)
    length = compressor.accumulator(torch.empty(BUCKET.numel), state).numel()
    refused, guard = 0, 32
    for _ in range(200):
        big = torch.zeros(length + 2 * guard)
        mutated = torch.from_numpy(laws.mutate(payload.body.clone().numpy(), rng))
        try:
            compressor.accumulate(Payload(mutated, BUCKET.numel), big[guard:-guard])
        except ValueError:
            refused += 1
        assert not bool(big[:guard].any() | big[-guard:].any())
    assert 0 < refused < 200
