"""QSGD as a compressor: unbiased, of bounded variance and exact size, drawn anew at every step."""

import math

import pytest
import torch

from tersegrad.compressors import QSGD
from tersegrad.core import HEADER_NBYTES, Layout, Payload, accumulate, sections
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import decode, roundtrip


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def draws(spec, x, count, seed=0):
    """What ``count`` encodings of the same vector decode to, one row each."""
    state = spec.init(Layout.flat(x.numel()), seed)
    rows = []
    for _ in range(count):
        rows.append(decode(spec, spec.encode(x, state), state))
        states.commit(state)
    return torch.stack(rows).double()


def steps_of(spec, x):
    """The step of each element."""
    parts = x.double().split(spec.bucket)
    scales = torch.stack([p.abs().max() if spec.norm == "max" else p.norm() for p in parts])
    return (scales / (2 ** (spec.bits - 1) - 1)).repeat_interleave(spec.bucket)[: x.numel()]


SPECS = [QSGD(), QSGD(bits=2, bucket=64), QSGD(bits=8, bucket=100), QSGD(bits=3, norm="l2"), QSGD(bits=16, bucket=7)]
every_spec = pytest.mark.parametrize("spec", SPECS, ids=repr)


@every_spec
def test_the_mean_over_many_draws_is_the_vector(spec):
    count, x = 2000, gaussian(600)
    step = steps_of(spec, x)
    part = x.double() / step
    part = part - part.floor()
    sigma = step * (part * (1 - part)).sqrt() / math.sqrt(count)
    # Beside the noise there is the rounding of products: half a unit in the last place of each of them.
    z = (draws(spec, x, count).mean(0) - x.double()).abs() / (sigma + 2.0**-22 * (step + x.abs().double()))
    assert float(z.max()) < 5
    if spec.bits <= 8:  # what is measured is noise, and not smaller than it should be
        assert 0.8 < float(z.square().mean()) < 1.2


@every_spec
def test_variance_is_that_of_a_coin(spec):
    """step^2 p (1 - p) an element, which is at most step^2 / 4."""
    x = gaussian(600)
    step = steps_of(spec, x)
    part = x.double() / step
    part = part - part.floor()
    squares = (draws(spec, x, 400) - x.double()).square().mean(0)
    assert float(squares.sum()) == pytest.approx(float((step.square() * part * (1 - part)).sum()), rel=0.05)
    assert float(squares.sum()) <= 1.05 * float(step.square().sum()) / 4


def test_variance_bound_of_the_paper():
    """E |Q(x) - x|^2 <= min(n / s^2, sqrt(n) / s) |x|^2 with the length as scale and s levels."""
    n = 512
    for x in (gaussian(n), torch.ones(n), torch.eye(n)[3] + 0.01):
        for bits in (2, 4, 8):
            levels = 2 ** (bits - 1) - 1
            error = (draws(QSGD(bits, n, "l2"), x, 100) - x.double()).square().sum(1).mean()
            bound = min(n / levels**2, math.sqrt(n) / levels) * float(x.double().square().sum())
            assert float(error) <= 1.05 * bound


def test_no_element_moves_by_more_than_a_step():
    x = gaussian(5000)
    decoded, _ = roundtrip(QSGD(4), x)
    assert bool(((decoded - x).abs().double() <= steps_of(QSGD(4), x) * (1 + 2.0**-20)).all())


@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize(("n", "bucket"), [(0, 512), (1, 512), (512, 512), (513, 512), (1000, 512), (1000, 7)])
def test_size_is_exact(bits, n, bucket):
    spec = QSGD(bits, bucket)
    _, payload = roundtrip(spec, gaussian(n))
    scales, codes = 4 * math.ceil(n / bucket), math.ceil(bits * n / 8)
    assert payload.nbytes == HEADER_NBYTES + scales + codes
    assert sections(spec, payload) == {"scales": scales, "codes": codes}


def test_every_bucket_has_its_own_scale_and_zeros_stay_zero():
    x = torch.cat([torch.zeros(512), gaussian(512) * 1e-20, gaussian(512) * 1e20, gaussian(3)])
    decoded, _ = roundtrip(QSGD(8), x)
    assert not bool(decoded[:512].any())
    for got, want in zip(decoded.split(512), x.split(512), strict=True):
        assert float((got.double() - want.double()).abs().max()) <= float(want.abs().max()) / 127 * (1 + 2.0**-20)
    assert float(decoded[-3:].abs().max()) == pytest.approx(float(x[-3:].abs().max()))


def test_the_largest_of_a_bucket_is_exact_but_for_rounding():
    x = gaussian(512 * 20)
    decoded, _ = roundtrip(QSGD(2), x)
    where = x.view(-1, 512).abs().argmax(1, keepdim=True)
    assert torch.allclose(decoded.view(-1, 512).gather(1, where), x.view(-1, 512).gather(1, where), rtol=1e-6)


# --- randomness


def test_draws_change_with_step_and_seed_and_nothing_else():
    x, spec = gaussian(1000), QSGD(4)
    first, again, other = (draws(spec, x, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_a_step_that_is_forgotten_is_drawn_again():
    x, spec = gaussian(1000), QSGD(4)
    state = spec.init(Layout.flat(1000), 0)
    before = states.copy(state)
    body = spec.encode(x, state).body.clone()
    assert states.copy(state) == before
    states.roll_back(state)
    assert torch.equal(spec.encode(x, state).body, body)
    states.commit(state)
    assert not torch.equal(spec.encode(x, state).body, body)


def test_errors_of_two_workers_are_not_the_same():
    x, spec = gaussian(20_000), QSGD(4)
    a, b = (draws(spec, x, 1, seed)[0] - x.double() for seed in (1, 2))
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(20_000)


# --- what cannot be


@every_spec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_body(spec, bad):
    x = gaussian(1000)
    x[613] = bad
    state = spec.init(Layout.flat(1000), 0)
    before = states.copy(state)
    payload = spec.encode(x, state)
    states.commit(state)
    assert not payload.finite
    assert payload.body.numel() == 0
    assert sections(spec, payload) == {}
    assert states.copy(state) == before


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 3.4028234e38])
def test_a_scale_that_cannot_be_is_refused_before_anything_is_added(scale):
    _, payload = roundtrip(QSGD(4, bucket=4), gaussian(10))
    body = payload.body.clone()
    body[4:8] = torch.tensor([scale], dtype=torch.float32).view(torch.uint8)
    acc = torch.ones(10)
    with pytest.raises(ValueError, match="a scale of"):
        accumulate(QSGD(4, bucket=4), Payload(body, 10), acc)
    assert bool((acc == 1).all())


def test_a_payload_decodes_at_any_address():
    x = gaussian(1000)
    decoded, payload = roundtrip(QSGD(4), x)
    for offset in range(1, 4):
        moved = torch.cat([torch.zeros(offset, dtype=torch.uint8), payload.body])[offset:]
        acc = torch.zeros(1000)
        accumulate(QSGD(4), Payload(moved, 1000), acc)
        assert torch.equal(acc, decoded)


def test_a_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"10 elements of QSGD\(\) take 9 bytes, and 8 came"):
        accumulate(QSGD(), Payload(torch.zeros(8, dtype=torch.uint8), 10), torch.zeros(10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 1}, "2 to 16 bits, of which one is the sign"),
        ({"bits": 17}, "2 to 16"),
        ({"bits": True}, "2 to 16"),
        ({"bucket": 0}, "one element or more"),
        ({"bucket": 12.5}, "one element or more"),
        ({"norm": "l1"}, "the norms are 'max', 'l2'"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        QSGD(**arguments)
