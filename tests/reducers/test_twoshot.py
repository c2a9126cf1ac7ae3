"""TwoShot: one sum in full precision, two encodings, both errors accounted for; two rounds whatever the workers."""

import re

import pytest
import torch

from support import exchange_cases
from support.cases import cases
from support.exchange_cases import WRONG, Corrupting, _Logged, _Tens, reduced, tens
from tersegrad.comm import threads
from tersegrad.comm.frame import FrameError
from tersegrad.compressors import BF16, FFT, QSGD, Identity, PerTensor, TopK
from tersegrad.core import HEADER_NBYTES, Layout, Summable
from tersegrad.engine.roundtrip import roundtrip
from tersegrad.reducers import AllGather, Ring, TwoShot
from tersegrad.testing import inputs, reducers, runs
from tersegrad.wrappers import ErrorFeedback

COMPRESSORS = [Identity(), BF16(), TopK(0.3), FFT(0.5), PerTensor(TopK(0.3))]


@cases(compressor=COMPRESSORS, numel=[1, 3, 101], size=[1, 2, 3, 4])
def test_laws_for_sizes_that_do_not_divide(compressor, numel, size):
    gradient, layout = inputs.laplace(numel), Layout.flat(numel)
    reducers.check_step(ErrorFeedback(TwoShot(compressor)), size, gradient, layout)
    reducers.check_step(TwoShot(compressor), size, gradient, layout)


def test_both_errors_stay_where_they_are_made():
    """Worked out by hand: all but the owner round their part to tens, the owner rounds the mean."""
    size, numel = 4, 12
    xs = 400 * torch.randn(size, numel, generator=torch.Generator().manual_seed(2))
    want_out, want_rest = torch.empty(numel), xs - tens(xs)
    for owner in range(size):
        here = slice(3 * owner, 3 * owner + 3)
        others = [tens(xs[w, here]) for w in range(size) if w != owner]
        mean = (xs[owner, here] + sum(others)) / size
        want_out[here] = tens(mean)
        want_rest[owner, here] = size * (mean - tens(mean))
    for worker, (out, rest) in enumerate(reduced(TwoShot(_Tens()), list(xs))):
        assert torch.equal(out, want_out)
        assert torch.allclose(rest, want_rest[worker], atol=1e-3)


def test_the_error_does_not_grow_with_the_workers_as_in_a_ring():
    """Rounded twice at most, against once per hop: with eight workers and a coarse codec that shows."""
    xs = [torch.randn(8000, generator=torch.Generator().manual_seed(rank)) for rank in range(8)]
    want = torch.stack(xs).mean(0)
    error = {make: float((reduced(make(BF16()), xs)[0][0] - want).norm()) for make in (Ring, TwoShot)}
    assert error[TwoShot] < 0.8 * error[Ring]


def test_one_worker_is_the_compressor_alone():
    x = inputs.laplace(1000)(0, 0)
    for compressor in (TopK(0.1), BF16(), FFT()):
        out, rest = reduced(TwoShot(compressor), [x])[0]
        decoded, _ = roundtrip(compressor, x)
        assert torch.equal(out, decoded)
        assert torch.allclose(rest, x - decoded, atol=1e-6)


@cases(compressor=[BF16(), TopK(0.3), FFT(0.5), QSGD()])
@cases(place=range(3))
@cases(rank=range(3))
def test_one_bad_value_anywhere_is_seen_everywhere(compressor, place, rank):
    xs = [inputs.laplace(60)(r, 0) for r in range(3)]
    xs[rank][20 * place + 3] = [float("nan"), float("inf"), float("-inf")][place]
    for out, _ in reduced(TwoShot(compressor), xs):
        assert not out.isfinite().all()


@cases(size=[2, 4, 8])
@cases(compressor=[Identity(), BF16(), TopK(0.05), QSGD()])
def test_traffic_does_not_grow_with_the_workers(compressor, size):
    numel = 32_000
    payload = roundtrip(compressor, torch.randn(numel, generator=torch.Generator().manual_seed(0)))[1]
    body, front = payload.body.numel(), payload.nbytes - payload.body.numel()  # header and meta
    messages = 2 * (size - 1)
    for sent in exchange_cases.sent_bytes(TwoShot(compressor), size, numel):
        assert sent <= 2 * body * (1 - 1 / size) * 1.02 + messages * (front + 16)
        if isinstance(compressor, Summable):
            assert sent == 2 * body * (size - 1) // size + messages * HEADER_NBYTES


def test_every_segment_is_encoded_while_the_one_before_travels():
    """Three messages are on their way before the first is waited for, and again three in the second round."""
    log = exchange_cases.events(TwoShot(_Logged()), 4)
    first = [*["encode", "start"] * 3, *["waited"] * 3]
    assert log == [*first, "encode", *["start"] * 3, *["waited"] * 3]


@cases(text=["TwoShot(BF16())", "ErrorFeedback(TwoShot(TopK(0.1)))", "TwoShot(QSGD())"])
@cases(numel=[3, 5000])
def test_processes_do_what_threads_do(gloo4, text, numel):
    over_gloo = gloo4.run(exchange_cases.over_gloo, text, numel)
    assert over_gloo == threads.run(4, lambda comm: exchange_cases.outcome(comm, text, numel))
    assert over_gloo[0][0::2] == over_gloo[3][0::2]


@cases(says=WRONG)
def test_a_wrong_frame_names_its_sender(says):
    def work(comm):
        comm = Corrupting(comm, WRONG[says]) if comm.rank == 2 else comm
        exchange_cases.outcome(comm, "TwoShot(TopK(0.1))", 1000)

    with pytest.raises(FrameError, match=says):
        threads.run(4, work)


@cases(text=["TwoShot(BF16())", "SignSGD()"])
def test_a_wrong_frame_ends_every_process_within_the_timeout(gloo4, text):
    ends = gloo4.run(exchange_cases.corrupt_over_gloo, text, 4.0)
    assert all(ends[rank].startswith("FrameError: rank 2's frame is corrupt") for rank in (0, 1, 3)), ends
    assert re.match("NetworkError|FrameError", ends[2])


def test_a_reducer_is_not_a_compressor():
    with pytest.raises(TypeError, match=r"Write e\.g\. TwoShot\(TopK"):
        TwoShot(Ring(BF16()))


FILTERS = Layout(("a", "b", "c"), ((96, 32, 3, 3), (100,), (50, 360)))


def test_filters_are_transformed_whole():
    """Segments begin at a filter, so that a wave in it is one bin; pieces of a flat vector would hold parts of it."""
    x = inputs.laplace(FILTERS.numel)(0, 0)
    x[: 96 * 288] += (torch.sin(torch.arange(288) / 20) * torch.arange(1, 97)[:, None]).flatten()  # one wave a filter
    error = {}
    for layout in (FILTERS, Layout.flat(FILTERS.numel)):
        traces = runs.run(TwoShot(FFT(0.95)), 4, lambda rank, step: x.clone(), layout, steps=1)
        error[layout.names] = float((traces[0].means[0] - x).norm() / x.norm())
    assert error["a", "b", "c"] < 0.6 * error["x",]


def test_bytes_of_spectra_do_not_grow_with_the_workers():
    sent = {
        (make, size): max(exchange_cases.sent_bytes(make(FFT(0.9)), size, 100_000))
        for make in (TwoShot, AllGather)
        for size in (2, 4, 8)
    }
    assert sent[AllGather, 8] > 6.9 * sent[AllGather, 2]
    for size in (4, 8):
        assert sent[TwoShot, size] < 1.1 * 2 * (size - 1) / size * sent[TwoShot, 2]


@cases(spec=[FFT(0.7), FFT(0.7, select="tensor"), FFT(0.7, order="channels_last"), FFT(0.7, rule="paper")])
def test_spectra_obey_the_laws(spec):
    gradient = inputs.laplace(FILTERS.numel)
    for size in (2, 3):
        reducers.check_step(ErrorFeedback(TwoShot(spec)), size, gradient, FILTERS)
        reducers.check_telescoping(ErrorFeedback(TwoShot(spec)), size)
