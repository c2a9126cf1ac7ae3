"""Ring: sums on the way, errors that stay where they are made, traffic that does not grow, messages that overlap."""

import re

import pytest
import torch

from support import exchange_cases
from support.cases import cases
from support.exchange_cases import WRONG, Corrupting, _Logged, _LoggedSum, _Tens, reduced, tens
from tersegrad.comm import threads
from tersegrad.comm.frame import FrameError
from tersegrad.compressors import BF16, FFT, FP16, QSGD, Identity, PerTensor, TopK
from tersegrad.core import HEADER_NBYTES, Layout, Payload, Step, Summable, reduce
from tersegrad.engine.roundtrip import roundtrip
from tersegrad.reducers import AllGather, Ring
from tersegrad.testing import inputs, reducers, runs
from tersegrad.wrappers import ErrorFeedback

COMPRESSORS = [Identity(), BF16(), TopK(0.3), FFT(0.5), PerTensor(TopK(0.3))]


def check_laws(compressor, numel, size):
    gradient, layout = inputs.laplace(numel), Layout.flat(numel)
    reducers.check_step(ErrorFeedback(Ring(compressor)), size, gradient, layout)
    reducers.check_step(Ring(compressor, pieces=1), size, gradient, layout)


@cases(compressor=COMPRESSORS, size=[1, 2, 3, 4])
def test_laws_for_sizes_that_do_not_divide(compressor, size):
    check_laws(compressor, 101, size)


@cases(compressor=COMPRESSORS, numel=[1, 3], size=[1, 2, 3, 4])
def test_laws_for_fewer_elements_than_pieces(compressor, numel, size):
    """Some pieces are empty: no message is sent for them."""
    check_laws(compressor, numel, size)


@cases(pieces=[1, 2, 3], size=[1, 2, 3, 4])
def test_nothing_is_lost_with_a_lossless_codec(size, pieces):
    gradient = inputs.laplace(inputs.LAYOUT.numel)
    for trace in runs.run(Ring(Identity(), pieces=pieces), size, gradient, steps=1):
        want = runs.mean([gradient(rank, 0) for rank in range(size)])
        runs.assert_close(trace.means[0], want, 1e-6, "mean")
        runs.assert_close(trace.rests[0], torch.zeros(inputs.LAYOUT.numel), 2e-6, "rest")


def test_each_worker_keeps_the_error_of_its_own_hop():
    """Worked out by hand: segment s goes s, s + 1, ..., and everyone rounds the sum so far to whole tens."""
    size, numel = 4, 12
    xs = 400 * torch.randn(size, numel, generator=torch.Generator().manual_seed(2))
    want_out, want_rest = torch.empty(numel), xs.clone()
    for s in range(size):
        here = slice(3 * s, 3 * s + 3)
        passing = torch.zeros(3)
        for hop in range(size):
            worker = (s + hop) % size
            total = passing + xs[worker, here] / size
            passing = tens(total)
            want_rest[worker, here] = size * (total - passing)
        want_out[here] = passing
    for worker, (out, rest) in enumerate(reduced(Ring(_Tens(), pieces=1), list(xs))):
        assert torch.equal(out, want_out)
        assert torch.allclose(rest, want_rest[worker], atol=1e-3)


@cases(codec=[BF16(), FP16()])
def test_payloads_are_added_in_their_own_dtype(codec):
    """The mean is the sum that torch makes of the 16-bit values, worker after worker; what it rounds away stays."""
    size, numel, dtype = 4, 8 * 20, codec.dtype
    xs = torch.randn(size, numel, generator=torch.Generator().manual_seed(3))
    want = torch.empty(numel)
    for s in range(2 * size):
        here = slice(20 * s, 20 * s + 20)
        order = [(s // 2 + hop) % size for hop in range(size)]
        total = xs[order[0], here].to(dtype) / size
        for worker in order[1:]:
            total = xs[worker, here].to(dtype) / size + total
        want[here] = total.float()
    results = reduced(Ring(codec), list(xs))
    for out, _ in results:
        assert torch.equal(out, want)
    left = sum(x.double() - rest.double() for x, (_, rest) in zip(xs, results, strict=True)) / size
    runs.assert_close(want, left, 1e-6, "law")


def test_one_worker_is_the_compressor_alone():
    x = inputs.laplace(1000)(0, 0)
    for compressor in (TopK(0.1), BF16(), FFT()):
        out, rest = reduced(Ring(compressor, pieces=1), [x])[0]
        decoded, _ = roundtrip(compressor, x)
        assert torch.equal(out, decoded)
        assert torch.allclose(rest, x - decoded, atol=1e-6)


# ---- non-finite ------------------------------------------------------------------------------------


@cases(compressor=[BF16(), TopK(0.3), FFT(0.5), QSGD()])
@cases(place=range(6))
@cases(rank=range(3))
def test_one_bad_value_anywhere_is_seen_everywhere(compressor, place, rank):
    xs = [inputs.laplace(60)(r, 0) for r in range(3)]
    xs[rank][10 * place + 3] = [float("nan"), float("inf"), float("-inf")][place % 3]
    for out, _ in reduced(Ring(compressor), xs):
        assert not out.isfinite().all()


def test_a_summable_payload_without_a_body_spoils_the_sum():
    """A codec may say that a vector is not finite by a flag alone: then there is nothing to add."""

    class _Flagged(Identity):
        def encode(self, x, state):
            finite = bool(x.isfinite().all())
            return super().encode(x, state) if finite else Payload.nonfinite(x.numel(), state, x.device)

    xs = [torch.ones(60) for _ in range(3)]
    xs[1][7] = float("inf")
    for out, _ in reduced(Ring(_Flagged()), xs):
        assert out[:10].isnan().all()
        assert torch.equal(out[20:], torch.ones(40))


# ---- traffic ---------------------------------------------------------------------------------------


@cases(pieces=[1, 2])
@cases(size=[2, 4, 8])
@cases(compressor=[Identity(), BF16(), TopK(0.05), QSGD()])
def test_traffic_does_not_grow_with_the_workers(compressor, size, pieces):
    numel = 32_000
    payload = roundtrip(compressor, torch.randn(numel, generator=torch.Generator().manual_seed(0)))[1]
    body, front = payload.body.numel(), payload.nbytes - payload.body.numel()  # header and meta
    messages = 2 * (size - 1) * pieces
    for sent in exchange_cases.sent_bytes(Ring(compressor, pieces=pieces), size, numel):
        assert sent <= 2 * body * (1 - 1 / size) * 1.02 + messages * (front + 16)
        if isinstance(compressor, Summable):
            assert sent == 2 * body * (size - 1) // size + messages * HEADER_NBYTES


def test_an_all_gather_is_what_does_grow():
    sent = {size: exchange_cases.sent_bytes(AllGather(TopK(0.05)), size, 32_000)[0] for size in (2, 8)}
    ring = {size: exchange_cases.sent_bytes(Ring(TopK(0.05)), size, 32_000)[0] for size in (2, 8)}
    assert sent[8] > 6.9 * sent[2]
    assert ring[8] < 2.2 * ring[2]
    assert ring[8] < sent[8] / 2


# ---- overlap ---------------------------------------------------------------------------------------


def test_a_part_that_may_be_added_is_encoded_while_the_sum_so_far_travels():
    """Four workers, one piece: own part, and three times: start, encode the next part, wait. Then totals are passed."""
    log = exchange_cases.events(Ring(_LoggedSum(), pieces=1), 4)
    assert log == ["encode", *["start", "encode", "waited"] * 3, *["start", "waited"] * 3]


def test_one_piece_is_encoded_while_the_other_travels():
    """Others cannot be encoded before the sum is there: so two pieces take turns, and one is always under way."""
    log = exchange_cases.events(Ring(_Logged()), 4)
    adding = ["encode", "start", "encode", "start", *["waited", "encode", "start"] * 4, *["waited", "encode"] * 2]
    assert log[: len(adding)] == adding
    assert log[len(adding) :] == ["start", "start", *["waited", "start"] * 4, "waited", "waited"]


def test_with_one_piece_nothing_else_is_under_way():
    """The two tests above can tell: without pieces every message is waited for before the next encoding."""
    log = exchange_cases.events(Ring(_Logged(), pieces=1), 4)
    assert log == ["encode", *["start", "waited", "encode"] * 3, *["start", "waited"] * 3]


# ---- over a wire -----------------------------------------------------------------------------------


@cases(text=["Ring(BF16())", "ErrorFeedback(Ring(TopK(0.1)))", "Ring(QSGD(), pieces=3)"])
def test_processes_do_what_threads_do(gloo4, text):
    check_processes(gloo4, text, 5000)


@cases(text=["Ring(BF16())", "ErrorFeedback(Ring(TopK(0.1)))", "Ring(QSGD(), pieces=3)"])
def test_processes_do_what_threads_do_with_fewer_elements_than_pieces(gloo4, text):
    check_processes(gloo4, text, 3)


def check_processes(gloo4, text, numel):
    over_threads = threads.run(4, lambda comm: exchange_cases.outcome(comm, text, numel))
    over_gloo = gloo4.run(exchange_cases.over_gloo, text, numel)
    assert over_gloo == over_threads
    assert over_gloo[0][0::2] == over_gloo[3][0::2]


@cases(says=WRONG)
@cases(compressor=[BF16(), TopK(0.1)])
def test_a_wrong_frame_names_its_sender(compressor, says):
    def work(comm):
        comm = Corrupting(comm, WRONG[says]) if comm.rank == 2 else comm
        exchange_cases.outcome(comm, repr(Ring(compressor)), 1000)

    with pytest.raises(FrameError, match=says):
        threads.run(4, work)


def test_a_stray_worker_is_named():
    def work(comm):
        exchange_cases.outcome(comm, "Ring(TopK(0.2))" if comm.rank == 2 else "Ring(TopK(0.1))", 1000)

    with pytest.raises(FrameError, match=r"rank [12] sent a frame for spec"):
        threads.run(4, work)


def test_bodies_that_cannot_be_added_are_refused():
    """A frame may be sealed well and still hold another number of bytes."""

    class _Short(Identity):
        def encode(self, x, state):
            payload = super().encode(x, state)
            return payload.trim(payload.body.numel() - 4 * state["_short"])

    reducer = Ring(_Short())

    def work(comm):
        layout = Layout.flat(80)
        memory = reducer.init(layout, comm)
        for segment in memory["segments"].values():
            segment["inner"]["_short"] = comm.rank == 2
        x = torch.ones(80)
        reduce(reducer, Step(layout), x, x, memory, comm)

    with pytest.raises(FrameError, match=r"rank [12] sent a body of .* they cannot be added"):
        threads.run(4, work)


def test_a_wrong_frame_ends_every_process_within_the_timeout(gloo4):
    ends = gloo4.run(exchange_cases.corrupt_over_gloo, "Ring(BF16())", 2.0)
    assert ends[3].startswith("FrameError: rank 2's frame is corrupt")
    assert all(re.match("NetworkError|FrameError", end) for end in ends)


@cases(pieces=[0, -1, 1.5, True, "two"])
def test_bad_pieces_are_refused(pieces):
    with pytest.raises(ValueError, match="Write pieces=2"):
        Ring(BF16(), pieces=pieces)


def test_a_reducer_is_not_a_compressor():
    with pytest.raises(TypeError, match=r"Write e\.g\. Ring\(BF16\(\)\)"):
        Ring(AllGather(BF16()))
