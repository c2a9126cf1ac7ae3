"""What a spec costs on this machine for one bucket, measured: time to code, bytes of its messages, memory."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.comm.metered import Tap
from tersegrad.comm.torch import Traffic, threads
from tersegrad.core import Bucket, Comm, Compressor, Pending, Reducer, State
from tersegrad.core import state as states
from tersegrad.plan.cost import ALL_GATHER, ALL_REDUCE, RING, TWO_SHOT, Link, load, payloads_decoded
from tersegrad.plan.timeline import Service
from tersegrad.reducers import Ring, TwoShot

SETTLE = 3  # steps before the clock starts and messages are looked at
ROUNDS = 5  # timed steps, of which the median counts
MOST_LAYOUTS = 6  # buckets of different shapes that are measured; others are scaled from the nearest


@dataclass(frozen=True)
class BucketCost:
    """One spec on one bucket."""

    numel: int
    encode: float  # seconds, with everything but the decoding of payloads
    decode: float  # seconds for one payload
    messages: tuple[tuple[str, int], ...]  # exchange and bytes of the payload, one after the other
    memory: int  # bytes that the method keeps between two steps
    ahead: float = 0.0  # seconds before forward, in which parameters step ahead

    def scaled(self, numel: int) -> "BucketCost":
        """For a bucket of another length: everything grows in proportion."""
        factor = numel / self.numel if self.numel else 0.0
        return BucketCost(
            numel,
            factor * self.encode,
            factor * self.decode,
            tuple((exchange, round(factor * nbytes)) for exchange, nbytes in self.messages),
            round(factor * self.memory),
            factor * self.ahead,
        )


@dataclass(frozen=True)
class Network:
    """The link as all-reduces and as single messages between workers find it."""

    all_reduce: Link
    messages: Link

    @staticmethod
    def of(link: Link) -> "Network":
        """The same link for both."""
        return Network(link, link)

    def link(self, exchange: str) -> Link:
        """The one that an exchange uses."""
        return self.all_reduce if exchange == ALL_REDUCE else self.messages


@dataclass(frozen=True)
class Split:
    """Where the time of one bucket goes, with so many workers."""

    encode: float
    wait: float
    decode: float
    sent: int
    work: float  # seconds in which a core is busy

    @property
    def service(self) -> Service:
        """As the timeline wants it."""
        return Service(self.encode + self.wait + self.decode, self.work)


def split(cost: BucketCost, workers: int, network: Network) -> Split:
    """The time of one bucket with ``workers`` workers."""
    wait, work, sent, decoded = 0.0, 0.0, 0, 1.0
    for exchange, nbytes in cost.messages:
        link, asked = network.link(exchange), load(exchange, workers, nbytes)
        seconds = link.seconds(*asked)
        wait, sent = wait + seconds, sent + asked.sent
        work += link.busy * seconds
        decoded = max(decoded, payloads_decoded(exchange, workers))
    decode = decoded * cost.decode
    return Split(cost.encode, wait, decode, sent, work + cost.encode + decode)


# ---- measuring -----------------------------------------------------------------------------------


def measure_all(spec: Reducer, buckets: Sequence[Bucket], gradients: Sequence[Tensor]) -> list[BucketCost]:
    """One cost a bucket; those of the same shapes are measured once, and of very many layouts only some."""
    spec = spec.settled()
    layouts = {bucket.shapes: i for i, bucket in enumerate(buckets)}
    by_size = sorted(layouts.values(), key=lambda i: buckets[i].numel)
    step = max(1, -(-len(by_size) // MOST_LAYOUTS))
    chosen = by_size[::-1][::step]  # the largest matters most
    known = {buckets[i].shapes: measure(spec, buckets[i], gradients[i]) for i in chosen}
    return [known.get(b.shapes) or _nearest(list(known.values()), b.numel).scaled(b.numel) for b in buckets]


def _nearest(costs: list[BucketCost], numel: int) -> BucketCost:
    return min(costs, key=lambda cost: abs(cost.numel - numel))


def measure(spec: Reducer, bucket: Bucket, gradient: Tensor) -> BucketCost:
    """Runs the spec: alone, for the time it takes to code; and with a second worker, for what it sends."""
    whole, memory = _time_alone(spec, bucket, gradient)
    messages = threads.run(2, lambda comm: _messages(spec, bucket, gradient, comm))[0]
    gathers = any(exchange != ALL_REDUCE for exchange, _ in messages)
    decode = min(_time_decode(spec, bucket, gradient), whole) if gathers else 0.0
    ahead, elsewhere = _time_ahead(gradient) if spec.ahead else (0.0, 0)
    return BucketCost(bucket.numel, whole - decode, decode, messages, memory + elsewhere, ahead)


def _step(spec: Reducer, bucket: Bucket, gradient: Tensor, comm: Comm) -> tuple[Callable[[], float], State]:
    """A function that makes one step and says how long it took, and the state that it works on."""
    mine = Bucket(bucket.names, bucket.shapes, seed=bucket.seed, lr=0.1)
    mine.squares = 4.0 * gradient.square()
    state, x = spec.init(mine, comm), torch.empty_like(gradient)

    def step() -> float:
        x.copy_(gradient)
        started = time.perf_counter()
        spec.reduce(mine, x, x, state, comm)
        seconds = time.perf_counter() - started
        states.settle(state, keep=True)
        mine.step += 1
        return seconds

    return step, state


def _time_alone(spec: Reducer, bucket: Bucket, gradient: Tensor) -> tuple[float, int]:
    step, state = _step(spec, bucket, gradient, _Alone())
    for _ in range(SETTLE):
        step()
    return statistics.median(step() for _ in range(ROUNDS)), nbytes_of(state)


def _messages(spec: Reducer, bucket: Bucket, gradient: Tensor, comm: Comm) -> tuple[tuple[str, int], ...]:
    """What two workers send in one step. Messages between them are one payload, in one piece or in several."""
    recorder = _Recorder(comm)
    step, _ = _step(spec, bucket, gradient, recorder)
    for _ in range(SETTLE):
        recorder.seen.clear()
        step()
    reduced = [(ALL_REDUCE, t.payload) for t in recorder.seen if t.collective == "all_reduce"]
    passed = sum(t.payload for t in recorder.seen if t.collective != "all_reduce")
    return (*reduced, *([(exchange_of(spec), passed)] if passed else []))


def exchange_of(spec: Reducer) -> str:
    """How payloads travel that are not summed on the way."""
    kinds = {type(part) for part in spec.walk()}
    return RING if Ring in kinds else TWO_SHOT if TwoShot in kinds else ALL_GATHER


def _time_decode(spec: Reducer, bucket: Bucket, gradient: Tensor) -> float:
    """Seconds that one more payload takes; 0 where the spec has no compressor of its own to try."""
    compressor = next((part for part in spec.walk() if isinstance(part, Compressor)), None)
    if compressor is None:
        return 0.0
    state, out = compressor.init(bucket, 0), torch.empty_like(gradient)
    for _ in range(SETTLE):
        payload = compressor.encode(gradient, state)
        states.settle(state, keep=True)
    if exchange_of(spec) == ALL_GATHER:  # decodes all of them together
        one, three = (partial(compressor.sum_decoded, [payload] * count, 1.0, out, state) for count in (1, 3))
        return max(0.0, _median_seconds(three) - _median_seconds(one)) / 2
    return _median_seconds(partial(compressor.accumulate, payload, compressor.accumulator(out, state)))


def _median_seconds(work: Callable[[], object]) -> float:
    """After once for nothing."""
    times = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _time_ahead(weights: Tensor) -> tuple[float, int]:
    """Seconds in which parameters step ahead by what waits, and bytes of the tensors that take their place."""
    there, waiting = torch.empty_like(weights), torch.zeros_like(weights)
    return _median_seconds(lambda: kernels.on(weights).add_scaled(weights, waiting, -0.1, there)), there.nbytes


def nbytes_of(state: State) -> int:
    """Bytes of all tensors in a state, scratch included; a tensor that is there twice counts once."""
    found: dict[int, int] = {}
    _collect(state, found)
    return sum(found.values())


def _collect(state: State, found: dict[int, int]) -> None:
    for value in state.values():
        if isinstance(value, dict):
            _collect(value, found)
        elif isinstance(value, Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()


class _Alone(Comm):
    """One worker, to whom nobody answers: no collective costs anything."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def all_reduce(self, x: Tensor) -> None:
        """The sum of one is there already."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """One's own."""
        return [x]

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        """There is nobody to send to."""
        raise RuntimeError("a single worker has nobody to send a message to.")

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """It is there already."""


class _Recorder(Tap):
    """Keeps what passes."""

    def __init__(self, inner: Comm):
        super().__init__(inner)
        self.seen: list[Traffic] = []

    def saw(self, traffic: Traffic, started: float, overlapped: float = 0.0) -> None:
        """One more."""
        self.seen.append(traffic)
