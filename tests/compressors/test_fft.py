"""FFT sparsification: numpy's spectrum as the oracle, and the invariants of the paper's method."""

import itertools
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cases import cases
from support.vectors import gaussian
from tersegrad import FFT, AllGather, ErrorFeedback, Identity, PerTensor, RangeFloat, TopK, roundtrip
from tersegrad.compressors.fft import fourier, piece_of_rows, split_rows
from tersegrad.compressors.fft.selection import largest
from tersegrad.core import HEADER_NBYTES, Layout, Payload, accumulate, decode_sum, pausing, sections
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import decode
from tersegrad.specs import parse
from tersegrad.testing import compressors, inputs, reducers, runs

LENGTHS = [1, 2, 3, 4, 5, 7, 34, 100, 101, 1001, 4097]


def exact(theta=0.0, **options):
    return FFT(theta, values=Identity(), **options)


def smooth(numel, rho, seed=0):
    """An AR(1) process: neighbours are correlated."""
    noise = gaussian(numel, seed).double().numpy()
    x = np.empty(numel)
    last = 0.0
    for i in range(numel):
        last = x[i] = rho * last + noise[i]
    return torch.from_numpy(x).float()


def encoded(compressor, x, shape=None):
    state = compressor.init(Layout(("x",), (tuple(shape or x.shape),)), 0)
    return compressor.encode(x.reshape(-1), state), state


def kept(payload):
    """How many bins are in a payload."""
    return struct.unpack_from("<I", payload.meta)[0]


def bins_of(compressor, payload):
    acc = torch.zeros(compressor.domain(payload.numel))
    accumulate(compressor, payload, acc)
    return acc.view(-1, 2)


def kept_set(compressor, x):
    payload, _ = encoded(compressor, x)
    return bins_of(compressor, payload).ne(0).any(1).nonzero().flatten().tolist()


def error(spec, x):
    decoded, _ = roundtrip(spec, x)
    return float((decoded - x).norm() / x.norm())


# ---- the transform -------------------------------------------------------------------------------


@cases(numel=LENGTHS)
@cases(options=[{}, {"chunk": 2}, {"chunk": 64}, {"chunk": 2**20}])
def test_with_all_bins_nothing_is_lost(numel, options):
    x = gaussian(numel)
    decoded, payload = roundtrip(exact(**options), x)
    assert float((decoded - x).abs().max()) < 1e-6
    assert kept(payload) == -(-numel // 2)


def test_the_bins_are_numpys_spectrum():
    x = gaussian(720)
    payload, _ = encoded(exact(chunk=720), x)
    half = np.fft.rfft(x.numpy().astype(np.float64), norm="ortho")
    bins = bins_of(exact(chunk=720), payload).numpy()
    assert np.allclose(bins[1:, 0] + 1j * bins[1:, 1], half[1:-1] * np.sqrt(2), atol=2e-6)
    assert np.allclose(bins[0], [half[0].real, half[-1].real], atol=2e-6)


def test_a_filter_is_a_piece_of_its_own():
    weight = gaussian(8 * 16 * 9).view(8, 16, 3, 3)
    payload, _ = encoded(exact(), weight)
    for i, bins in enumerate(bins_of(exact(), payload).view(8, 72, 2).numpy()):
        half = np.fft.rfft(weight[i].reshape(-1).numpy().astype(np.float64), norm="ortho")
        assert np.allclose(bins[1:, 0] + 1j * bins[1:, 1], half[1:-1] * np.sqrt(2), atol=2e-6)


def test_channels_last_reads_a_filter_position_by_position():
    weight = gaussian(8 * 16 * 9).view(8, 16, 3, 3)
    compressor = exact(order="channels_last")
    payload, _ = encoded(compressor, weight)
    turned, _ = encoded(exact(), weight.permute(0, 2, 3, 1).contiguous())
    assert torch.equal(bins_of(compressor, payload), bins_of(exact(), turned))
    assert float((roundtrip(compressor, weight)[0] - weight).abs().max()) < 1e-6


@cases(shape=[(1000,), (40, 50), (40, 50, 1, 1), ()])
def test_channels_last_leaves_alone_what_is_no_kernel(shape):
    x = gaussian(int(np.prod(shape))).view(shape)
    plain, turned = (encoded(FFT(order=order), x)[0] for order in ("natural", "channels_last"))
    assert torch.equal(plain.body, turned.body)


@cases(
    "row length",
    [(64, 64), (27, 54), (9, 36), (1, 32), (363, 726), (4608, 4608), (9216, 4608), (25088, 6272), (50257, 0), (0, 0)],
)
def test_pieces_are_whole_rows_where_a_fast_length_allows(row, length):
    assert piece_of_rows(row) == length


@given(st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=6), st.booleans())
def test_every_element_is_in_one_piece(shapes, turn):
    place = 0
    for run in itertools.chain(*split_rows(shapes, turn)):
        assert run.start == place
        assert run.length % run.positions == 0
        place = run.stop
    numel = sum(int(np.prod(shape)) for shape in shapes)
    assert place == numel + numel % 2


def test_a_bucket_of_odd_tensors_comes_back():
    bucket = Layout(("a", "b", "c", "d"), ((3,), (5, 7, 3, 3), (11, 13), (1,)))
    x = gaussian(bucket.numel)
    for order in ("natural", "channels_last"):
        compressor = exact(order=order)
        state = compressor.init(bucket, 0)
        payload = compressor.encode(x, state)
        assert float((decode(compressor, payload, state) - x).abs().max()) < 1e-6


# ---- the selection -------------------------------------------------------------------------------


@given(numel=st.integers(1, 400), theta=st.floats(0, 0.999), seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_exactly_k_bins_are_kept_and_the_error_is_bounded(numel, theta, seed):
    """Parseval: dropping the smallest bins loses at most their share of the energy."""
    x = gaussian(numel, seed)
    compressor = exact(theta)
    payload, state = encoded(compressor, x)
    bins = -(-numel // 2)
    assert kept(payload) == max(1, round((1 - theta) * bins))
    lost = float((decode(compressor, payload, state).double() - x.double()).square().sum())
    assert lost <= (1 - kept(payload) / bins) * float(x.double().square().sum()) + 1e-10


def test_the_error_is_the_energy_of_what_was_left_out():
    x = gaussian(1000)
    energy = bins_of(exact(chunk=1000), encoded(exact(chunk=1000), x)[0]).double().square().sum(1).sort().values
    for theta in (0.1, 0.5, 0.9):
        dropped = energy[: 500 - round((1 - theta) * 500)].sum().sqrt()
        assert error(exact(theta, chunk=1000), x) == pytest.approx(float(dropped / x.norm()), rel=1e-4)


def test_more_bins_never_make_the_error_larger():
    x = smooth(5000, 0.5)
    errors = [error(exact(theta), x) for theta in (0.99, 0.95, 0.9, 0.7, 0.5, 0.2, 0.0)]
    assert errors == sorted(errors, reverse=True)


def test_sending_what_was_sent_sends_it_again():
    x = gaussian(2000)
    once, _ = roundtrip(exact(0.8), x)
    twice, _ = roundtrip(exact(0.8), once)
    assert torch.allclose(once, twice, atol=1e-6)


@cases(cycles=[1, 37, 499])
def test_a_sinusoid_is_one_bin(cycles):
    t = torch.arange(1000, dtype=torch.float64) / 1000
    x = torch.sin(2 * torch.pi * cycles * t + 0.7).float()
    assert error(exact(0.999, chunk=1000), x) < 1e-5
    assert kept_set(exact(0.999, chunk=1000), x) == [cycles]


@cases(wave=[[0.3, 0.3], [0.3, -0.3], [0.5, 0.1]])
def test_the_mean_and_the_fastest_wave_share_a_bin(wave):
    x = torch.tensor(wave).repeat(500)
    assert error(exact(0.999, chunk=1000), x) < 1e-6
    assert kept_set(exact(0.999, chunk=1000), x) == [0]


@cases(by=[1, 10, 333])
def test_shifting_in_a_circle_keeps_the_kept_set(by):
    x = smooth(1000, 0.9)
    compressor = exact(0.9, chunk=1000)
    assert kept_set(compressor, x.roll(by)) == kept_set(compressor, x)


@cases(factor=[2.0**-120, 2.0**-70, 0.25, 2.0**64, 2.0**100])
def test_homogeneous(factor):
    x = gaussian(1000)
    decoded, _ = roundtrip(exact(0.8), x)
    scaled, _ = roundtrip(exact(0.8), x * factor)
    assert kept_set(exact(0.8), x * factor) == kept_set(exact(0.8), x)
    assert torch.allclose(scaled / factor, decoded, atol=1e-5)


@cases("x fft topk", [(gaussian(40_000), 0.753, 0.664), (smooth(40_000, 0.95), 0.226, 0.668)])
def test_errors_at_theta_085_are_those_worked_out_for_the_method(x, fft, topk):
    """On independent numbers selection in the spectrum is worse than plain top-k, on smooth ones it is better."""
    assert error(exact(0.85, chunk=40_000), x) == pytest.approx(fft, abs=0.01)
    assert error(TopK(0.15), x) == pytest.approx(topk, abs=0.02)


@cases(theta=[0.5, 0.85, 0.99])
@cases(rho=[0.0, 0.9])
def test_the_fitted_threshold_keeps_about_as_many(theta, rho):
    compressor = exact(theta, select="sidco")
    shares = []
    state = compressor.init(Layout.flat(40_000), 0)
    for step in range(10):
        shares.append(kept(compressor.encode(smooth(40_000, rho, step), state)) / 20_000)
        states.commit(state)
    assert np.mean(shares[5:]) == pytest.approx(1 - theta, rel=0.1)
    assert max(shares) <= 1.2 * (1 - theta) + 1e-4


def test_the_fitted_threshold_keeps_the_largest():
    x = smooth(20_000, 0.9)
    everything = bins_of(exact(), encoded(exact(), x)[0]).norm(dim=1)
    sent = kept_set(exact(0.9, select="sidco"), x)
    left = torch.ones(10_000, dtype=torch.bool)
    left[sent] = False
    assert float(everything[sent].min()) >= float(everything[left].max())


@cases(numel=[101, 50_001, 300_000])
@cases(options=[{}, {"chunk": 64}, {"chunk": "tensor"}, {"chunk": 1000}])
def test_while_in_the_cache_the_same_bins_are_found_as_by_comparing_all(numel, options):
    x = smooth(numel, 0.5) * torch.linspace(0.1, 3, numel)
    for theta in (0.0, 0.5, 0.85, 0.99):
        compressor = FFT(theta, **options)
        state = compressor.init(Layout.flat(numel), 0)
        chosen, picked = pausing.run(compressor._compared(x, state))
        found = pausing.run(largest(x, compressor._groups(numel, state), state))
        if found is None:  # a single long piece: there is nothing to guess a threshold from
            assert options == {"chunk": "tensor"}
            assert numel > 10_000
            continue
        assert torch.equal(found[0], chosen)
        assert torch.equal(found[1], picked)


def test_a_bad_guess_costs_time_only():
    x = torch.full((400_000,), 1e-3) * gaussian(400_000)
    x.view(-1, 64)[largest_drawn(x)] *= 1e3  # all that is looked at is large, and nothing else
    compressor = exact(0.5, chunk=64)
    state = compressor.init(Layout.flat(x.numel()), 0)
    assert pausing.run(largest(x, compressor._groups(x.numel(), state), state)) is None
    chosen, picked = pausing.run(compressor._compared(x, state))
    payload = compressor.encode(x, state)
    acc = torch.zeros(x.numel())
    accumulate(compressor, payload, acc)
    assert torch.equal(acc.view(-1, 2)[chosen.long()].flatten(), picked)
    assert kept(payload) == 100_000


def largest_drawn(x):
    compressor = exact(0.5, chunk=64)
    state = compressor.init(Layout.flat(x.numel()), 0)
    pausing.run(largest(x, compressor._groups(x.numel(), state), state))
    return state["_drawn 0"]


def test_every_tensor_sends_its_own_share():
    layout = Layout(("a", "norm", "bias", "b"), ((40, 50), (30,), (31,), (7, 9, 3, 3)))
    x = gaussian(layout.numel)
    x[:2000] *= 100.0
    compressor = exact(0.8, select="tensor")
    payload = compressor.encode(x, compressor.init(layout, 0))
    sent = bins_of(compressor, payload).ne(0).any(1)
    bins = [1000, 30, 284]  # vectors share pieces; the last tensor begins at an odd place, and ends at one
    assert [int(part.sum()) for part in sent.split(bins)] == [round(0.2 * n) for n in bins]
    together = bins_of(exact(0.8), exact(0.8).encode(x, exact(0.8).init(layout, 0))).ne(0).any(1)
    assert int(together[1000:].sum()) == 0


@cases(scale=[1e-30, 1.0, 1e30])
def test_every_tensor_sends_its_share_at_any_scale(scale):
    """Where squares are out of range the bins are compared all at once: the same are sent."""
    layout = Layout(("a", "b"), ((64, 64), (10, 100)))
    x = gaussian(layout.numel)
    compressor = exact(0.8, select="tensor")
    sent = [bins_of(compressor, compressor.encode(y, compressor.init(layout, 0))).ne(0).any(1) for y in (x, x * scale)]
    assert torch.equal(*sent)


# ---- sums and memory -----------------------------------------------------------------------------


@cases(spec=["FFT(0.7, values=Identity())", "PerTensor(FFT(0.7))", "FFT(0.7, select='sidco')"])
def test_the_mean_is_the_mean_of_the_decoded(spec):
    compressor = parse(spec)
    gradients = [inputs.laplace(inputs.LAYOUT.numel)(rank, 0) for rank in range(3)]
    decoded = []
    for x in gradients:
        state = compressor.init(inputs.LAYOUT, 0)
        decoded.append(decode(compressor, compressor.encode(x, state), state))
    traces = runs.run(AllGather(compressor), 3, lambda rank, step: gradients[rank].clone(), steps=1)
    assert torch.allclose(traces[0].means[0].double(), runs.mean(decoded), atol=1e-5)


def test_however_many_workers_there_is_one_transform_back(monkeypatch):
    calls = []
    inverse = fourier.inverse
    monkeypatch.setattr(fourier, "inverse", lambda *args, **kw: (calls.append(kw), inverse(*args, **kw)))
    compressor = FFT()
    x = gaussian(1000)
    payload, state = encoded(compressor, x)
    out = torch.empty(1000)
    decode_sum(compressor, [payload] * 5, 0.2, out, state)
    assert len(calls) == 1
    assert torch.allclose(out, decode(compressor, payload, state), atol=1e-5)


def test_only_bins_that_were_sent_are_touched():
    x = gaussian(1000)
    payload, _ = encoded(FFT(0.9), x)
    acc = torch.full((1000,), -0.0)
    accumulate(FFT(0.9), payload, acc)
    untouched = torch.signbit(acc) & (acc == 0)
    assert int(untouched.sum()) == 900


@cases(size=[1, 2, 3, 4])
@cases(
    spec=[
        "FFT(0.8)",
        "FFT(0.8, order='channels_last')",
        "FFT(0.99, chunk=64, select='sidco')",
        "PerTensor(FFT(0.8, values=BF16()))",
    ]
)
def test_with_error_feedback_nothing_is_lost(spec, size):
    reducer = ErrorFeedback(AllGather(parse(spec)))
    gradient = inputs.laplace(inputs.LAYOUT.numel)
    reducers.check_step(reducer, size, gradient)
    reducers.check_telescoping(reducer, size, gradient)


def test_a_checkpoint_in_other_buckets_keeps_the_pieces():
    compressor = FFT(0.5, order="channels_last", values=Identity())
    bucket = Layout(("a", "b"), ((4, 8, 3, 3), (6, 20)))
    other = Layout(("c", "b"), ((10,), (6, 20)))
    saved = states.copy(compressor.init(bucket, 0))
    fresh = compressor.init(other, 0)
    states.merge(states.split(saved, bucket), fresh, other)
    x = gaussian(other.numel)
    payload = compressor.encode(x, fresh)
    assert torch.equal(payload.body, compressor.encode(x, compressor.init(other, 0)).body)


# ---- bytes ---------------------------------------------------------------------------------------


def test_two_bits_an_element_at_the_papers_setting():
    x = gaussian(200_000)
    decoded, payload = roundtrip("FFT()", x)
    assert kept(payload) == 15_000
    bits = 8 * payload.nbytes / x.numel()
    assert 1.79 < bits < 1.85  # 1.5 for the values, 0.305 for the positions: entropy, where a bitmap has 0.5
    assert float((decoded - x).norm() / x.norm()) == pytest.approx(0.753, abs=0.01)


def test_bytes_are_accounted_for():
    payload, _ = encoded(FFT(), gaussian(10_000))
    found = sections(FFT(), payload)
    assert sum(found.values()) == payload.nbytes - HEADER_NBYTES
    assert found["values"] == -(-2 * 750 * 10 // 8)
    assert sections(FFT(), Payload(payload.body[:0], 10_000, finite=False)) == {}


@cases(numel=[10_000, 9_999])
def test_bytes_that_were_tampered_with_are_refused_or_decode_to_something(numel):
    """As ``check_hostile_bytes``, with an accumulator that is longer than the vector where that is odd."""
    rng = np.random.default_rng(5)
    compressor = FFT(0.9)
    payload, _ = encoded(compressor, gaussian(numel))
    good, guard, refused = Payload(payload.body.clone(), numel, payload.meta), 32, 0
    for _ in range(300):
        big = torch.zeros(10_000 + 2 * guard)
        acc = big[guard:-guard]
        try:
            accumulate(compressor, compressors.hostile(good, rng), acc)
        except ValueError as problem:
            assert str(problem)  # noqa: PT017
            assert not bool(acc.any())
            refused += 1
        assert not bool(big[:guard].any() | big[-guard:].any())
    assert 0 < refused < 300


@cases(where=[0, 4096, -1])
@cases(bad=[float("nan"), float("inf")])
def test_what_is_not_finite_makes_no_body(bad, where):
    x = gaussian(10_001)
    x[where] = bad
    payload, state = encoded(FFT(), x)
    assert not payload.finite
    assert bool(decode(FFT(), payload, state).isnan().all())


@cases(bad=[float("nan"), float("inf")], where=[slice(None), slice(0, 1), slice(100_000, 100_001), slice(0, 20_000)])
def test_many_pieces_of_which_some_are_non_finite(bad, where):
    """Some of them are drawn to guess a threshold, and some are not."""
    layout = Layout(("filters", "matrix"), ((64, 32, 3, 3), (2000, 100)))
    for compressor in (FFT(0.7, order="channels_last"), FFT(0.9, select="tensor"), FFT(0.9, chunk=64)):
        x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
        x[where] = bad
        assert not compressor.encode(x, compressor.init(layout, 0)).finite


# ---- what is refused -----------------------------------------------------------------------------


@cases(
    "options says",
    [
        ({"theta": 1.0}, "at least 0 and below 1"),
        ({"theta": -0.1}, "at least 0 and below 1"),
        ({"theta": float("nan")}, "at least 0 and below 1"),
        ({"theta": True}, "at least 0 and below 1"),
        ({"theta": "0.5"}, "at least 0 and below 1"),
        ({"select": "largest"}, "'topk', 'tensor', 'sidco'"),
        ({"order": "filters"}, "'natural' or 'channels_last'"),
        ({"chunk": 1000, "order": "channels_last"}, "Write chunk='row'"),
        ({"chunk": 1000, "select": "tensor"}, "from one tensor into the next"),
        ({"chunk": 34 * 3}, "chunk=100"),
        ({"chunk": 999}, "chunk=990"),
        ({"chunk": 0}, "from 2 to"),
        ({"chunk": 2**21}, "from 2 to"),
        ({"chunk": 64.0}, "from 2 to"),
        ({"chunk": "rows"}, "'row', 'tensor' or a number"),
        ({"values": TopK(0.1)}, "would drop values"),
        ({"values": FFT()}, "would drop values"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(options, says):
    with pytest.raises(ValueError, match=says):
        FFT(**options)


def test_no_other_method_takes_it_for_a_value_codec():
    with pytest.raises(ValueError, match="would drop values"):
        TopK(0.1, values=FFT())
    with pytest.raises(TypeError, match="values must be a compressor"):
        FFT(values="bf16")


def test_the_expression():
    assert repr(FFT()) == "FFT()"
    assert parse("FFT(0.9, values=BF16(), chunk=512)") == FFT(0.9, values=parse("BF16()"), chunk=512)
    assert FFT() == FFT(theta=0.85, values=RangeFloat(bits=10), chunk="row", select="topk", order="natural")
    assert repr(PerTensor(FFT(0.5))) == "PerTensor(FFT(theta=0.5))"
