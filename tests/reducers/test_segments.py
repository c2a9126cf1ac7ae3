"""Segments: where a bucket is cut, what each is encoded with, and what becomes of that when buckets change."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.cases import cases
from support.exchange_cases import _Tens
from tersegrad.comm import threads
from tersegrad.comm.frame import FrameError
from tersegrad.comm.torch import NetworkError
from tersegrad.compressors import BF16, FFT, QSGD, Identity, PerTensor, SIDCo, TopK
from tersegrad.core import UNSIGNED, Layout, Pending, Step, Summable, adds_in_place, reduce, state
from tersegrad.reducers import Ring, TwoShot
from tersegrad.reducers._segments import Segment, Term, arriving, places
from tersegrad.testing import inputs, runs
from tersegrad.wrappers import ErrorFeedback


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 9))
def test_segments_cover_the_bucket_once_and_are_of_one_length(sizes, count):
    bucket = Layout(tuple(f"t{i}" for i in range(len(sizes))), tuple((size,) for size in sizes))
    parts = places(bucket, count, {})
    assert [start for _, start, _ in parts] == [0, *(stop for _, _, stop in parts[:-1])]
    assert parts[-1][2] == bucket.numel
    assert {part.numel for part, _, _ in parts} <= {bucket.numel // count, -(-bucket.numel // count)}
    assert all(part.numel == stop - start and 0 not in part.sizes for part, start, stop in parts)
    owners = [name for name, size in zip(bucket.names, bucket.sizes, strict=True) for _ in range(size)]
    for part, start, stop in parts:
        assert [n for n, size in zip(part.names, part.sizes, strict=True) for _ in range(size)] == owners[start:stop]


def test_a_whole_tensor_keeps_its_shape_and_a_piece_is_flat():
    parts = places(Layout(("a", "b"), ((3, 2), (2, 5))), 2, {})
    assert [part.shapes for part, _, _ in parts] == [((3, 2), (2,)), ((8,),)]


@given(
    st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=6),
    st.integers(1, 9),
)
def test_rows_stay_whole_where_that_is_asked_for(shapes, count):
    bucket = Layout(tuple(f"t{i}" for i in range(len(shapes))), tuple(map(tuple, shapes)))
    parts = places(bucket, count, {}, whole_rows=True)
    assert [start for _, start, _ in parts] == [0, *(stop for _, _, stop in parts[:-1])]
    assert parts[-1][2] == bucket.numel
    of = dict(zip(bucket.names, bucket.shapes, strict=True))
    for part, start, stop in parts:
        assert part.numel == stop - start
        for name, shape in zip(part.names, part.shapes, strict=True):
            assert shape[1:] == of[name][1:]
    longest = max((math.prod(shape[1:]) for shape in shapes if len(shape) > 1), default=0)
    assert all(abs(part.numel - bucket.numel / count) <= longest + 1 for part, _, _ in parts)


def test_segments_of_one_tensor_are_told_apart():
    ids = [part.id for part, _, _ in places(Layout.flat(1000), 4, {})]
    assert len(set(ids)) == 4


def test_places_are_kept_until_the_bucket_changes():
    state, bucket = {}, Layout.flat(1000)
    first = places(bucket, 4, state)
    assert places(bucket, 4, state) is first
    assert places(Layout.flat(1001), 4, state)[-1].stop == 1001


def seeds(reducer, size):
    def work(comm):
        segments = reducer.init(Layout.flat(100), comm)["segments"].values()
        return [segment["inner"]["seed"] for segment in segments]

    return threads.run(size, work)


@cases(reducer=[Ring(QSGD()), TwoShot(QSGD()), Ring(_Tens(), pieces=3)])
def test_no_two_encodings_draw_the_same_random_numbers(reducer):
    drawn = [seed for worker in seeds(reducer, 3) for seed in worker]
    assert len(set(drawn)) == len(drawn)


def test_payloads_that_are_added_are_made_with_the_same_random_numbers():
    class _Added(_Tens, Summable):
        dtype = torch.float32

    mine, *others = seeds(Ring(_Added()), 3)
    assert all(theirs == mine for theirs in others)
    assert len(set(mine)) == len(mine)


# ---- DDP splits the model into other buckets ---------------------------------------------------------

STATEFUL = [SIDCo(0.1), PerTensor(SIDCo(0.1)), PerTensor(TopK(0.1)), FFT(), QSGD()]
NEW = [
    Layout(("c.weight", "a.bias"), ((3, 5, 3, 3), (20,)), seed=7),
    Layout(("b.weight", "a.weight"), ((50, 31), (37, 20)), seed=7),
]


@cases(make=[Ring, TwoShot])
@cases(compressor=STATEFUL)
def test_other_buckets_begin_with_a_fresh_compressor_and_all_that_was_remembered(make, compressor):
    reducer = ErrorFeedback(make(compressor))
    old = runs.run(reducer, 3, inputs.laplace(inputs.LAYOUT.numel))
    for bucket in NEW:

        def work(comm, bucket=bucket):
            mine = Layout(bucket.names, bucket.shapes, seed=bucket.seed)
            memory, untouched = reducer.init(mine, comm), reducer.init(mine, comm)
            state.merge(state.split(old[comm.rank].state, inputs.LAYOUT), memory, mine)
            untouched["residual"] = memory["residual"].clone()
            assert memory["residual"].any()
            means = []
            for held in (memory, untouched):
                x = inputs.laplace(mine.numel)(comm.rank, 0)
                reduce(reducer, Step(mine), x, x, held, comm)
                state.commit(held)
                means.append(x)
            assert runs.same(state.copy(memory), state.copy(untouched))
            return means

        for pasted, fresh in threads.run(3, work):
            assert torch.equal(pasted, fresh)


def test_a_step_that_is_rolled_back_leaves_the_old_state():
    reducer = Ring(SIDCo(0.1))
    old = runs.run(reducer, 1, inputs.laplace(inputs.LAYOUT.numel))[0].state
    comm = threads.run(1, lambda comm: comm)[0]
    bucket = NEW[1]
    memory = reducer.init(bucket, comm)
    state.merge(state.split(old, inputs.LAYOUT), memory, bucket)
    before = state.copy(memory)
    x = torch.full((bucket.numel,), float("nan"))
    reduce(reducer, Step(bucket), x, x, memory, comm)
    state.roll_back(memory)
    assert runs.same(state.copy(memory), before)


# ---- one segment -------------------------------------------------------------------------------------


def segment(compressor, x):
    bucket = Layout.flat(x.numel())
    return Segment(compressor, 1, Step(bucket), compressor.init(bucket, 0), {}, x, torch.empty_like(x), UNSIGNED)


@cases(numel=[64, 65])
@cases(compressor=[Identity(), BF16(), TopK(0.2), FFT(0.8), PerTensor(FFT(0.5))])
def test_add_is_x_plus_what_the_payloads_stand_for(compressor, numel):
    """Whatever domain the compressor sums in, and though ``x`` is not empty."""
    a, b, x = torch.randn(3, numel, generator=torch.Generator().manual_seed(1))
    made = [segment(compressor, v) for v in (a, b)]
    payloads = [s.encode() for s in made]
    for s, payload in zip(made, payloads, strict=True):
        s.decode(payload, 0)
    into = segment(compressor, x.clone())
    first, second = (1.0, -2.5) if adds_in_place(compressor) else (-2.5, -2.5)  # in another domain all scales are one
    into.add([Term(payloads[0], first, 0), Term(payloads[1], second, 1)])
    assert torch.allclose(into.x, x + first * made[0].out + second * made[1].out, atol=1e-5)
    made[0].subtract(payloads[0])
    assert torch.allclose(made[0].x + made[0].out, torch.randn(3, numel, generator=torch.Generator().manual_seed(1))[0])


def test_an_empty_segment_sends_nothing_and_still_waits():
    empty = segment(TopK(0.1), torch.empty(0))
    payload = empty.encode()
    assert empty.capacity == empty.seal(payload).numel() == 0
    waited = []
    empty.add(Term(waited.append(i), 1.0, 0) for i in range(3))
    empty.decode(payload, 0)
    empty.subtract(payload)
    assert waited == [0, 1, 2]


def test_a_codec_that_makes_more_bytes_than_any_needs_is_refused_where_it_sends():
    class _Wordy(_Tens):
        def encode(self, x, state):
            return type(Identity().encode(x, state)).empty(10_000, x.numel(), state, x.device)

    wordy = segment(_Wordy(), torch.zeros(10))
    with pytest.raises(ValueError, match="made 10064 bytes of 10 elements"):
        wordy.seal(wordy.encode())


def test_a_body_that_makes_no_sense_names_its_sender():
    """Its frame is in order: only the codec can tell."""
    one, other = segment(TopK(0.2), torch.ones(10)), segment(TopK(0.2), torch.ones(10))
    payload = one.encode()
    payload.meta = b"\xc8" + payload.meta[1:]  # 200 elements, of ten
    opened = one.open(one.seal(payload), 3)
    for use in (lambda: other.decode(opened, 3), lambda: other.add([Term(opened, 1.0, 3)])):
        with pytest.raises(FrameError, match=r"rank 3 sent a frame that cannot be decoded: .* announces 200"):
            use()


def test_nothing_of_an_earlier_frame_can_be_taken_for_a_header():
    one = segment(Identity(), torch.ones(10))
    buffer = one.receive_buffer("here")
    frame = one.seal(one.encode())
    buffer[: frame.numel()].copy_(frame)
    assert one.open(buffer, 0).numel == 10
    again = one.receive_buffer("here")
    assert again.data_ptr() == buffer.data_ptr()
    with pytest.raises(ValueError, match=r"rank 0 sent b'\\x00"):
        one.open(again, 0)


class _Scripted(Pending):
    """A message that has arrived, or an error of the network."""

    def __init__(self, end, log):
        self.end, self.log = end, log

    def wait(self):
        self.log.append(self)
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


@cases(third_fails=[False, True])
@cases(wrong=[0, 1])
def test_a_wrong_frame_is_an_error_when_the_other_messages_have_come(wrong, third_fails):
    """Else this rank's own are forgotten with it; and the frame is what is spoken of, whatever happens after it."""
    one, log = segment(Identity(), torch.ones(10)), []
    frames = [one.seal(one.encode()).clone() for _ in range(3)]
    frames[wrong][-1] ^= 1
    ends = [frames[0], frames[1], NetworkError("timed out") if third_fails else frames[2]]
    messages = [_Scripted(end, log) for end in ends]
    comm = threads.run(4, lambda comm: comm)[1]
    came = []
    with pytest.raises(FrameError, match=f"rank {(0, 3)[wrong]}'s frame is corrupt"):
        came.extend(arriving(messages, [one] * 3, comm))
    assert log == messages
    assert [rank for rank, _ in came] == [0][:wrong]


@cases(reducer=[Ring(TopK(0.1)), Ring(BF16()), TwoShot(FFT()), TwoShot(BF16())])
def test_buffers_are_kept_from_step_to_step(reducer):
    """Those that messages arrive in too, which a single worker has none of."""

    def places(memory):
        own = {key: value.data_ptr() for key, value in memory.items() if isinstance(value, torch.Tensor)}
        return own | {f"{k}.{i}": p for k, v in memory.items() if isinstance(v, dict) for i, p in places(v).items()}

    def work(comm):
        bucket, seen = Layout.flat(10_000), []
        memory = reducer.init(bucket, comm)
        for _ in range(4):
            x = inputs.laplace(10_000)(comm.rank, 0)
            reduce(reducer, Step(bucket), x, x, memory, comm)
            state.commit(memory)
            seen.append(places(memory))
        assert any("lane" in key or "from" in key for key in seen[0])
        return seen[2] == seen[3]

    assert all(threads.run(3, work))
