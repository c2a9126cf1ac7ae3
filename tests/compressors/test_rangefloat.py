"""RangeFloat as a compressor: bytes, ranges, the choice of the mantissa over steps, refusals."""

import math

import pytest
import torch

from support.cases import cases
from tersegrad.compressors import RangeFloat, TopK
from tersegrad.compressors.rangefloat import TUNE_EVERY, codes
from tersegrad.core import HEADER_NBYTES, Layout, Payload, accumulate, sections
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import decode, roundtrip


def gaussian(n, scale=1.0, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


def with_spike(n):
    """One element is a hundred times as large as the others, which still hold half of the energy."""
    x = gaussian(n)
    x[0] = 100.0
    return x


def fresh(spec, x):
    return spec.init(Layout.flat(x.numel()), 0)


def step(spec, x, state, keep=True):
    payload = spec.encode(x, state)
    (states.commit if keep else states.roll_back)(state)
    return payload


def layout_of(spec, payload):
    return codes.read_layout(payload.meta, spec.bits)


@cases(bits=range(2, 17))
@cases(n=[0, 1, 7, 8, 1000])
def test_size_is_exact(bits, n):
    _, payload = roundtrip(RangeFloat(bits), gaussian(n))
    assert len(payload.meta) == 9  # the layout
    assert payload.body.numel() == math.ceil(bits * n / 8)
    assert payload.nbytes == HEADER_NBYTES + 16 + payload.body.numel()
    assert sections(RangeFloat(bits), payload) == {"meta": 16, "values": math.ceil(bits * n / 8)}


@cases("bits error", [(4, 0.14), (8, 0.014), (10, 0.0035), (12, 0.0012)])
def test_error_on_a_gaussian(bits, error):
    """From 4 bits on, another bit halves the error."""
    x = gaussian(100_000)
    decoded, _ = roundtrip(RangeFloat(bits), x)
    assert 0.8 * error < float((decoded - x).norm() / x.norm()) < error


def test_the_range_is_that_of_the_vector_at_every_step():
    spec, x = RangeFloat(8), gaussian(1000)
    state = fresh(spec, x)
    for scale in (1.0, 1.5, 1e-6, 1e30):
        largest = float((x * scale).abs().max())
        assert layout_of(spec, step(spec, x * scale, state)).high == pytest.approx(largest, rel=2.0**-4)


def test_a_given_range_clips_and_takes_a_mirror_image():
    x = torch.tensor([-3.0, -0.3, 0.0, 0.3, 3.0])
    assert roundtrip(RangeFloat(8, high=1.0), x)[0][[0, 4]].tolist() == [-1.0, 1.0]
    assert roundtrip(RangeFloat(8, low=-1.0), x)[0][[0, 4]].tolist() == [-1.0, 1.0]
    assert roundtrip(RangeFloat(8, low=-0.5, high=2.0), x)[0][[0, 4]].tolist() == [-0.5, 2.0]
    assert roundtrip(RangeFloat(8, low=0.0, high=2.0), x)[0][[0, 1, 4]].tolist() == [0.0, 0.0, 2.0]


def test_an_asymmetric_range_spends_its_codes_where_they_are_asked_for():
    x = gaussian(10_000).abs()
    end = float(x.max())
    both, one = (roundtrip(RangeFloat(8, low=low, high=end), x)[0] for low in (-end, 0.0))
    assert float((one - x).norm()) < 0.6 * float((both - x).norm())


def test_truncation_is_the_papers_and_shrinks():
    x = gaussian(10_000)
    cut, _ = roundtrip(RangeFloat(8, mantissa=3, rounding="truncate"), x)
    rounded, _ = roundtrip(RangeFloat(8, mantissa=3), x)
    assert bool((cut.abs() <= x.abs()).all())
    assert 0.95 < float(cut.abs().sum() / x.abs().sum()) < 0.965
    assert float(rounded.abs().sum() / x.abs().sum()) == pytest.approx(1.0, abs=0.002)


# --- over steps


def test_the_mantissa_follows_a_distribution_that_moves():
    spec, narrow, wide = RangeFloat(8), gaussian(20_000), with_spike(20_000)
    state = fresh(spec, narrow)
    first = layout_of(spec, step(spec, narrow, state)).mantissa
    assert layout_of(spec, step(spec, wide, state)).mantissa < first  # the largest element is another one: at once
    assert layout_of(spec, step(spec, narrow, state)).mantissa == first


def test_a_change_that_the_largest_element_does_not_show_is_seen_in_time():
    spec, narrow = RangeFloat(8), gaussian(20_000)
    wide = with_spike(20_000)
    wide *= narrow.abs().max() / wide.abs().max()
    state = fresh(spec, narrow)
    first = layout_of(spec, step(spec, narrow, state)).mantissa
    seen = [layout_of(spec, step(spec, wide, state)).mantissa for _ in range(TUNE_EVERY)]
    assert seen[:-1] == [first] * (TUNE_EVERY - 1)
    assert seen[-1] < first


def test_a_step_that_is_forgotten_leaves_no_trace():
    spec, narrow = RangeFloat(8), gaussian(20_000)
    state = fresh(spec, narrow)
    step(spec, narrow, state)
    before = states.copy(state)
    step(spec, with_spike(20_000), state, keep=False)
    assert states.copy(state) == before
    spec.encode(narrow, state)
    assert states.copy(state) == before


def test_nothing_is_kept_where_nothing_is_chosen():
    assert fresh(RangeFloat(8, mantissa=3), torch.zeros(5)) == {}


# --- special vectors


@cases(spec=[RangeFloat(8), RangeFloat(8, 3, -1.0, 1.0), RangeFloat(3, rounding="truncate")])
@cases(bad=[math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_body(spec, bad):
    x = gaussian(1000)
    x[613] = bad
    state = fresh(spec, x)
    before = states.copy(state)
    payload = step(spec, x, state)
    assert not payload.finite
    assert payload.body.numel() == 0
    assert sum(sections(spec, payload).values()) == 0
    assert bool(decode(spec, payload, state).isnan().all())
    assert states.copy(state) == before


@cases(bits=[2, 5, 8, 16])
@cases(value=[0.0, -0.25, 1e-45, -3e-39, 1.17549435e-38, torch.finfo(torch.float32).max])
def test_a_constant_vector_is_exact_to_its_mantissa(bits, value):
    x = torch.full((1000,), value)
    for n in (1, 1000):
        decoded, payload = roundtrip(RangeFloat(bits), x[:n])
        mantissa = layout_of(RangeFloat(bits), payload).mantissa
        normal = max(abs(value), 2.0**-126)
        assert bool(((decoded.double() - x[:n].double()).abs() <= normal * 2.0**-mantissa).all())


def test_denormals_are_numbers_with_even_steps():
    x = torch.linspace(-1, 1, 1001) * 2.0**-127
    decoded, payload = roundtrip(RangeFloat(8), x)
    step = 2.0 ** -(126 + layout_of(RangeFloat(8), payload).mantissa)
    assert float((decoded.double() - x.double()).abs().max()) <= step / 2
    assert float(decoded.max()) == 2.0**-127


def test_a_payload_decodes_alone():
    x = gaussian(1000)
    spec = RangeFloat(8)
    payload = spec.encode(x, fresh(spec, x))
    acc = torch.zeros(1000)
    other = RangeFloat(8, mantissa=7, low=-9.0, high=4.0)
    accumulate(other, Payload(payload.body.clone(), 1000, payload.meta), acc)
    assert torch.equal(acc, roundtrip(spec, x)[0])


def test_values_of_a_sparse_method():
    x = gaussian(10_000)
    spec = TopK(0.01, values=RangeFloat(8))
    decoded, payload = roundtrip(spec, x)
    plain, _ = roundtrip(TopK(0.01), x)
    assert torch.equal(decoded != 0, plain != 0)
    assert float((decoded - plain).norm() / plain.norm()) < 0.01  # they lie close together, so mantissas are long
    assert sections(spec, payload)["values"] == 100


@cases(
    "arguments message",
    [
        ({"bits": 1}, r"bits=1\): 2 to 16 bits.*Identity"),
        ({"bits": 17}, "2 to 16"),
        ({"bits": 8.0}, "2 to 16"),
        ({"bits": 8, "mantissa": 8}, "0 to 7 of 8 bits. Leave it out"),
        ({"bits": 8, "mantissa": -1}, "0 to 7"),
        ({"low": 0.5}, "low is at most 0"),
        ({"high": math.inf}, "finite"),
        ({"high": math.nan}, "finite"),
        ({"high": 1e39}, "finite float32"),
        ({"low": 0.0}, "zero only.*Give both"),
        ({"low": 0.0, "high": 0.0}, "zero only"),
        ({"rounding": "up"}, 'write "nearest" or "truncate"'),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        RangeFloat(**arguments)
