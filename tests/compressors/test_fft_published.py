"""FFT(rule="paper") and the preset "fft-paper" against the published pipeline, written from its text in NumPy."""

import numpy as np
import pytest
import torch

from support.cases import cases
from support.vectors import gaussian
from tersegrad import FFT, AllGather, ErrorFeedback, Identity, PerTensor, RangeFloat, roundtrip
from tersegrad.compressors.fft.published import LARGEST
from tersegrad.core import HEADER_NBYTES, Layout, decode_sum
from tersegrad.engine.roundtrip import decode
from tersegrad.specs import parse
from tersegrad.specs.presets import PRESETS
from tersegrad.testing import inputs, reducers, runs

N, M, THETA = 10, 5, 0.85
VALUES = RangeFloat(N, mantissa=M, low=-1.0, high=1.0, rounding="truncate")
PAPER = FFT(THETA, values=VALUES, rule="paper")


# ---- the pipeline, as it is printed ---------------------------------------------------------------


def float16_spectrum(x):
    """fp32 -> fp16, one real-to-complex transform of the whole vector."""
    return np.fft.rfft(x.astype(np.float16).astype(np.float64), norm="ortho")


def status_of(spectrum, theta):
    """1 for the (1 - theta) of the bins with the largest magnitudes."""
    k = max(1, round((1 - theta) * spectrum.size))
    status = np.zeros(spectrum.size, bool)
    status[np.argsort(-np.abs(spectrum), kind="stable")[:k]] = True
    return status


def range_code(x, bits, mantissa, high, eps=None):
    """Shift the pattern right, count from eps; negatives after the positives; clip at the ends, zero below eps."""
    shift = 23 - mantissa
    pattern = np.minimum(np.abs(x), np.float32(high)).astype(np.float32).view(np.int32).astype(np.int64) >> shift
    top = int(np.float32(high).view(np.int32)) >> shift
    base = top - (2 ** (bits - 1) - 1) + 1 if eps is None else int(np.float32(eps).view(np.int32)) >> shift
    positives = top - base + 1
    code = np.maximum(pattern - base + 1, 0)
    return np.where((x < 0) & (code > 0), code + positives, code)


def range_value(code, bits, mantissa, high):
    shift = 23 - mantissa
    positives = 2 ** (bits - 1) - 1
    base = (int(np.float32(high).view(np.int32)) >> shift) - positives + 1
    step = np.where(code > positives, code - positives, code)
    value = ((step - 1 + base) << shift).astype(np.int32).view(np.float32)
    return np.where(code == 0, 0, np.where(code > positives, -value, value))


def unpacked(data, bits):
    """Little-endian numbers of some bits."""
    stream = np.unpackbits(data, bitorder="little")
    return stream[: stream.size // bits * bits].reshape(-1, bits) @ (1 << np.arange(bits))


def whole_words(nbytes):
    return -(-nbytes // 8) * 8


def gradient(numel, seed=0):
    return 0.03 * gaussian(numel, seed)


# ---- what is sent ---------------------------------------------------------------------------------


@cases(numel=[1, 2, 3, 7, 1000, 1001, 10_007, 65_536])
@cases(theta=[0.0, 0.5, 0.85, 0.99])
def test_status_codes_and_result_are_those_of_the_paper(numel, theta):
    x = gradient(numel)
    compressor = FFT(theta, values=VALUES, rule="paper")
    state = compressor.init(Layout.flat(numel), 0)
    payload = compressor.encode(x, state)
    spectrum = float16_spectrum(x.numpy())
    status = status_of(spectrum, theta)
    body = payload.body.numpy()
    bitmap = np.packbits(status, bitorder="little")
    assert np.array_equal(body[: bitmap.size], bitmap)
    dense = spectrum[status].astype(np.complex64).view(np.float32)
    sent = unpacked(body[whole_words(bitmap.size) :], N)[: dense.size]
    expected = range_code(dense, N, M, 1.0)
    differ = sent != expected  # the last bit of a bin may lie on either side of a step
    assert np.abs(sent - expected).max() <= 1
    assert differ.mean() < 0.001
    back = np.zeros(spectrum.size, np.complex128)
    back[status] = range_value(sent, N, M, 1.0).reshape(-1, 2) @ np.array([1, 1j])
    found = decode(compressor, payload, state).numpy()
    assert np.allclose(found, np.fft.irfft(back, n=numel, norm="ortho"), atol=1e-6)


@cases("theta ratio", [(0.5, 5.82), (0.7, 9.14), (0.85, 16.0), (0.9, 21.33), (0.95, 32.0), (0.99, 53.3)])
def test_the_measured_ratio_is_the_one_that_counts_the_bitmap(theta, ratio):
    numel = 1_000_000
    _, payload = roundtrip(FFT(theta, values=VALUES, rule="paper"), gradient(numel))
    bins = numel // 2 + 1
    counted = whole_words(-(-bins // 8)) + -(-2 * N * round((1 - theta) * bins) // 8)
    assert payload.nbytes == HEADER_NBYTES + 32 + counted
    assert 4 * numel / payload.nbytes == pytest.approx(ratio, rel=0.005)


def test_the_preset_sends_a_sixteenth():
    spec = parse(PRESETS["fft-paper"].spec)
    assert spec == AllGather(PerTensor(PAPER))
    layout = Layout(("w", "v"), ((256, 512), (1000, 90)))
    compressor = spec.compressor
    payload = compressor.encode(gradient(layout.numel), compressor.init(layout, 0))
    assert 4 * layout.numel / payload.nbytes == pytest.approx(16.0, rel=0.01)


def test_the_layout_of_figure_8_can_be_sent():
    eight = RangeFloat(8, mantissa=3, low=-2.0, high=2.0, rounding="truncate", eps=0.125)
    x = torch.tensor([0.256, -0.256, 0.125, 0.124, 2.0, 7.0, -7.0, 0.0])
    decoded, payload = roundtrip(eight, x)
    assert payload.body.tolist() == [9, 42, 1, 0, 33, 33, 66, 0]
    assert payload.body.tolist() == range_code(x.numpy(), 8, 3, 2.0, eps=0.125).tolist()
    assert decoded.tolist() == [0.25, -0.25, 0.125, 0.0, 2.0, 2.0, -2.0, 0.0]


@cases(
    "options says",
    [
        ({"eps": 0.1}, "Give mantissa and high too"),
        ({"eps": 0.1, "high": 1.0}, "Give mantissa and high too"),
        ({"eps": 0.0, "high": 1.0, "mantissa": 3}, "eps is positive"),
        ({"eps": 2.0, "high": 1.0, "mantissa": 3}, "from -1.0 to 1.0"),
        ({"eps": 1e-9, "high": 1.0, "mantissa": 3}, "Write eps=1.9073486328125e-05 or more"),
    ],
)
def test_an_eps_that_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        RangeFloat(8, **options)


# ---- what it loses, and what it does not ----------------------------------------------------------


def test_a_range_of_one_clips_what_is_larger():
    """Kept honest: nothing is rescaled, so a bin beyond the range comes back as one."""
    wave = torch.cos(2 * torch.pi * 5 * torch.arange(1000) / 1000)  # one bin of sqrt(1000) / 2
    decoded, _ = roundtrip(PAPER, wave)
    assert float(decoded.norm() / wave.norm()) == pytest.approx(2 / 1000**0.5, rel=1e-3)


def test_elements_are_rounded_to_float16_and_saturated():
    x = gradient(1000)
    whole = FFT(0.0, values=Identity(), rule="paper")
    assert float((roundtrip(whole, x)[0] - x.half().float()).abs().max()) < 1e-7
    x[7] = 1e30
    decoded, payload = roundtrip(whole, x)
    assert payload.finite
    assert float(decoded[7]) == pytest.approx(LARGEST, rel=1e-5)


def test_one_inverse_transform_gives_the_mean():
    states = [PAPER.init(Layout.flat(999), 0) for _ in range(3)]
    payloads = [PAPER.encode(gradient(999, seed), state) for seed, state in enumerate(states)]
    alone = [decode(PAPER, payload, state) for payload, state in zip(payloads, states, strict=True)]
    out = torch.empty(999)
    decode_sum(PAPER, payloads, 1 / 3, out, states[0])
    assert torch.allclose(out, torch.stack(alone).mean(0), atol=1e-6)


@cases(spec=["FFT(0.8, rule='paper')", "PerTensor(FFT(0.8, rule='paper'))", "FFT(0.8, chunk='tensor')"])
def test_with_error_feedback_nothing_is_lost(spec):
    reducer = ErrorFeedback(AllGather(parse(spec)))
    reducers.check_telescoping(reducer, 3, inputs.laplace(inputs.LAYOUT.numel))


@cases(numel=[1, 2, 3, 101, 10_007])
def test_a_tensor_in_one_piece_of_any_length(numel):
    x = gaussian(numel)
    whole = FFT(0.0, values=Identity(), chunk="tensor")
    assert float((roundtrip(whole, x)[0] - x).abs().max()) < 1e-5


def bins_in(means):
    """How many bins of a mean are not zero."""
    return [int((np.abs(np.fft.rfft(mean.numpy().astype(np.float64), norm="ortho")) > 1e-4).sum()) for mean in means]


@cases(
    "law kept",
    [
        ("drops={1.0: 0.9, 0.1: 0.0}", [50, 50, 501]),  # 0.9 until the learning rate drops, then nothing is dropped
        ("smoothness=8.1", [50, round((1 - 0.45) * 501), round((1 - 0.081**0.5) * 501)]),  # theta^2 = L * rate
    ],
)
def test_theta_diminishes_with_the_learning_rate(monkeypatch, law, kept):
    rates = [0.1, 0.025, 0.01]
    monkeypatch.setattr(runs, "learning_rate", lambda step: rates[step])
    schedule = f"Schedule(AllGather(FFT(0.9, values=Identity(), rule='paper')), 'theta', {law})"
    traces = runs.run(parse(schedule), 1, lambda rank, step: gaussian(1000, step), Layout.flat(1000), steps=3)
    assert bins_in(traces[0].means) == kept


@cases(options=[{"chunk": "tensor"}, {"chunk": 64}, {"select": "sidco"}, {"order": "channels_last"}])
def test_the_papers_rule_has_no_other_options(options):
    with pytest.raises(ValueError, match="Leave out chunk, select and order"):
        FFT(rule="paper", **options)


def test_another_rule_is_refused():
    with pytest.raises(ValueError, match="the rules are 'ours', 'paper'"):
        FFT(rule="theirs")
