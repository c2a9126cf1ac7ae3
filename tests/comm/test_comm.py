"""Every Comm does the same, and says truly what it puts on the wire."""

import time

import pytest
import torch

from support import comm_cases
from support.cases import cases
from tersegrad import AllGather, AllReduce, Dense, Metered, Throttled, TopK
from tersegrad.comm import metered as taps
from tersegrad.comm import threads
from tersegrad.comm.traffic import all_gather_traffic, broadcast_traffic
from tersegrad.compressors import BF16
from tersegrad.core import Layout, Pending, Step, reduce


@cases(size=[1, 2, 3, 4])
def test_threads(size):
    assert threads.run(size, comm_cases.check) == ["ok"] * size


@cases(size=[1, 3, 4])
def test_gloo(gloo4, size):
    assert gloo4.run(comm_cases.over_gloo, size) == ["ok"] * size + ["outside"] * (4 - size)


def test_gloo_gives_up_on_a_message_that_does_not_come(gloo4):
    assert "imed out" in gloo4.run(comm_cases.silent_neighbour, 1.0)[1]


@cases(numel=[1, 5, 10007])
def test_gloo_all_reduce_gives_all_ranks_the_same_bits(gloo4, numel):
    results = gloo4.run(comm_cases.all_reduce_bits, numel)
    assert all(r == results[0] for r in results)


@cases(tap=[Metered, Throttled("1Gbit", latency="1us"), Throttled()])
def test_taps_change_nothing(tap):
    assert threads.run(3, lambda comm: comm_cases.check(tap(comm))) == ["ok"] * 3


def test_an_error_in_one_worker_releases_the_others():
    def work(comm):
        if comm.rank == 1:
            raise KeyError("worker one")
        comm.all_reduce(torch.ones(3))

    with pytest.raises(KeyError, match="worker one"):
        threads.run(3, work)


def test_an_error_in_one_worker_releases_those_that_wait_for_a_message():
    def work(comm):
        if comm.rank == 1:
            raise KeyError("worker one")
        comm.start_shift(torch.ones(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)).wait()

    with pytest.raises(KeyError, match="worker one"):
        threads.run(3, work)


def test_threads_refuse_a_message_that_is_changed_on_its_way():
    def work(comm):
        x = torch.ones(3, dtype=torch.uint8)
        message = comm.start_shift(x, torch.empty(3, dtype=torch.uint8))
        x.zero_()
        message.wait()

    with pytest.raises(ValueError, match=r"changed between start_shift\(\) and wait"):
        threads.run(2, work)


def test_threads_refuse_a_vector_that_is_changed_while_it_is_summed():
    def work(comm):
        x = torch.ones(3)
        message = comm.start_all_reduce(x)
        x.zero_()
        message.wait()

    with pytest.raises(ValueError, match=r"changed between start_all_reduce\(\) and wait"):
        threads.run(2, work)


def test_threads_say_how_many_bytes_really_crossed():
    def work(comm):
        comm.all_reduce(torch.zeros(5))
        comm.all_gather(torch.zeros(3 + comm.rank, dtype=torch.uint8))
        comm.start_shift(torch.zeros(7, dtype=torch.uint8), torch.zeros(7, dtype=torch.uint8)).wait()
        comm.broadcast(torch.zeros(2), root=1)
        return comm.handed_over

    assert threads.run(2, work) == [20 + 3 + 7, 20 + 4 + 7 + 8]


def test_threads_refuse_a_message_that_is_longer_than_its_buffer():
    def work(comm):
        comm.start_shift(torch.ones(3 + comm.rank, dtype=torch.uint8), torch.empty(3, dtype=torch.uint8)).wait()

    with pytest.raises(ValueError, match="rank 1 sent 4 bytes into a buffer of 3"):
        threads.run(2, work)


def metered(reducer, size, numel, steps=1):
    def work(comm):
        meter = Metered(comm)
        layout = Layout.flat(numel)
        x = torch.linspace(-1, 1, numel) * (comm.rank + 1)
        state = reducer.init(layout, comm)
        for number in range(steps):
            meter.begin(layout.id)
            reduce(reducer, Step(layout, number), x.clone(), torch.empty_like(x), state, meter)
            meter.end()
        return meter

    return threads.run(size, work)


@cases(size=[1, 2, 4])
def test_metered_counts_ring_all_reduce(size):
    for reducer, width in ((Dense(), 4), (AllReduce(BF16()), 2)):
        for meter in metered(reducer, size, 1000):
            assert meter.total.payload == 1000 * width
            assert meter.total.sent == 2 * (size - 1) * 1000 * width // size
            assert meter.by_collective["all_reduce"].calls == 1


@cases(size=[1, 2, 4])
def test_metered_counts_whole_frames_to_all_others(size):
    spec = AllGather(TopK(0.1))
    x = torch.linspace(-1, 1, 1000)
    frame = spec.compressor.encode(x, spec.compressor.init(Layout.flat(1000), 0)).nbytes
    for meter in metered(spec, size, 1000, steps=5):
        assert meter.total.sent == 5 * (size - 1) * frame
        assert size == 1 or meter.by_bucket[Layout.flat(1000).id].sent == meter.total.sent
        assert size == 1 or meter.by_collective["shift"].calls == 5 * (size - 1)
        assert size == 1 or min(meter.timing.encode, meter.timing.wait, meter.timing.decode) > 0


def test_all_gather_counts_padding_to_the_longest():
    traffic = all_gather_traffic(4, [10, 100, 3, 0], rank=2, with_sizes=False)
    assert (traffic.payload, traffic.sent, traffic.hops) == (3, 3 * 104, 3)


@cases(size=range(1, 9))
@cases(root=[0, 2])
def test_a_broadcast_tree_reaches_everybody_once(size, root):
    sent = [broadcast_traffic(size, 1, rank, root % size).sent for rank in range(size)]
    assert sum(sent) == size - 1


def test_throttled_takes_as_long_as_the_link_would():
    link = Throttled("8Mbit", latency="5ms")

    def work(comm):
        started = time.perf_counter()
        link(comm).all_reduce(torch.zeros(10_000))
        return time.perf_counter() - started

    expected = 1.5 * 40_000 / 1e6 + 6 * 0.005  # 2(n-1)/n of 40 kB at 1 MB/s, and 2(n-1) messages of 5 ms
    for seconds in threads.run(4, work):
        assert seconds >= expected  # a lower bound is exact; how much later is the machine's affair


class Clock:
    """Time that passes only when somebody sleeps or works."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(taps.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(taps.time, "sleep", self.work)

    def work(self, seconds):
        self.now += seconds


def alone(monkeypatch, size=2):
    """A worker of two, whose messages arrive at once and whose clock is ours."""

    class Sent(Pending):
        def wait(self):
            return torch.empty(0)

    class Nobody(threads.ThreadComm):
        def __init__(self):
            self.rank, self.size = 0, size

        def start_shift(self, x, into, by=1):
            return Sent()

        def start_all_reduce(self, x):
            return Sent()

    return Nobody(), Clock(monkeypatch)


NBYTES = 1_000_000
MESSAGE = torch.zeros(NBYTES, dtype=torch.uint8)


def test_throttled_counts_from_the_start_of_a_message(monkeypatch):
    """One second of link time: work in the meantime is free, up to that second."""
    nobody, clock = alone(monkeypatch)
    link = Throttled("8Mbit", latency="10ms")(nobody)
    for work, after in ((0.0, 1.01), (0.4, 1.01), (1.01, 1.01), (3.0, 3.0)):
        began = clock.now
        message = link.start_shift(MESSAGE, MESSAGE)
        clock.work(work)
        message.wait()
        assert clock.now - began == pytest.approx(after)


def test_throttled_messages_share_the_bandwidth_and_not_the_latency(monkeypatch):
    nobody, clock = alone(monkeypatch)
    link = Throttled("8Mbit", latency="10ms")(nobody)
    began = clock.now
    messages = [link.start_shift(MESSAGE, MESSAGE) for _ in range(3)]
    for i, message in enumerate(messages, start=1):
        message.wait()
        assert clock.now - began == pytest.approx(i + 0.01)
    link.start_shift(MESSAGE, MESSAGE)  # under way while the others go on
    link.all_reduce(torch.zeros(NBYTES // 4))
    assert clock.now - began == pytest.approx(3.01 + 1.0 + 2 * 0.01)


def test_metered_tells_waiting_from_overlapping(monkeypatch):
    nobody, clock = alone(monkeypatch)
    meter = Metered(Throttled("8Mbit")(nobody))
    meter.begin(7)
    clock.work(0.2)
    message = meter.start_shift(MESSAGE, MESSAGE)
    clock.work(0.3)
    message.wait()
    clock.work(0.5)
    meter.end()
    total, timing = meter.total, meter.timing
    assert (total.calls, total.payload, total.sent) == (1, NBYTES, NBYTES)
    assert (total.seconds, total.overlapped) == (pytest.approx(0.7), pytest.approx(0.3))
    assert (timing.encode, timing.wait, timing.decode) == tuple(map(pytest.approx, (0.2, 0.7, 0.8)))
    assert meter.by_bucket[7] == meter.by_collective["shift"] == total


def test_a_message_to_nobody_costs_nothing(monkeypatch):
    nobody, clock = alone(monkeypatch)
    began = clock.now
    Throttled("8Mbit", latency="10ms")(nobody).start_shift(MESSAGE[:0], MESSAGE).wait()
    assert clock.now == began


@cases(text=["fast", "100", "Mbit", "-1Mbit", "0Mbit", "1 furlong"])
def test_throttled_refuses_what_is_no_rate(text):
    with pytest.raises(ValueError, match=r"100Mbit|zero bandwidth"):
        Throttled(text)


def test_throttled_refuses_what_is_no_time():
    with pytest.raises(ValueError, match=r"1ms, 0\.5s or 80us"):
        Throttled("1Gbit", latency="soon")
