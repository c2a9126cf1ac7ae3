"""Measure the cost of a spec on this machine for one bucket: coding time, bytes of its messages, memory."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.comm import threads
from tersegrad.core import (
    Comm,
    Compressor,
    Layout,
    Pending,
    Reducer,
    State,
    Step,
    accumulate,
    adds_in_place,
    decode_sum,
    needs_of,
    reduce,
    settled,
)
from tersegrad.core import state as states
from tersegrad.plan.cost import ALL_GATHER, ALL_REDUCE, Link, load, payloads_decoded
from tersegrad.plan.made_up import Gradients
from tersegrad.plan.recording import Recorder, messages_of
from tersegrad.plan.timeline import Service

WARMUP = 3  # steps before timing and recording start
LATER = 30  # the same for methods that need squares: after so many steps VGC sends as much as it adds
ROUNDS = 5  # timed steps; the result is their median
MOST_LAYOUTS = 6  # different buckets that are measured; others are scaled from the nearest in size


@dataclass(frozen=True)
class BucketCost:
    """One spec on one bucket."""

    numel: int
    encode: float  # seconds of everything but decoding payloads
    decode: float  # seconds for one payload
    messages: tuple[tuple[str, int], ...]  # collective and bytes of the payload, in order
    memory: int  # bytes that the method keeps between two steps
    ahead: float = 0.0  # seconds to shift the parameters before forward (StepAhead)

    def scaled(self, numel: int) -> "BucketCost":
        """The cost of a bucket of another length, scaled in proportion."""
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
    """The measured link: one fit for all-reduces, one for messages between two workers."""

    all_reduce: Link
    messages: Link

    @staticmethod
    def of(link: Link) -> "Network":
        """The same link for both."""
        return Network(link, link)

    def link(self, exchange: str) -> Link:
        """The link for a kind of exchange."""
        return self.all_reduce if exchange == ALL_REDUCE else self.messages


@dataclass(frozen=True)
class Split:
    """How the time of one bucket is spent, for a number of workers."""

    encode: float
    wait: float
    decode: float
    sent: int
    work: float  # seconds in which a core is busy

    @property
    def service(self) -> Service:
        """The same as input of the timeline."""
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


def measure_all(spec: Reducer, buckets: Sequence[Layout], gradients: Sequence[Tensor]) -> list[BucketCost]:
    """One cost per bucket. Buckets of the same shapes are measured once, and of very many layouts only some.

    Args:
        spec: what to measure; as it is after warm-ups and schedules by steps have ended.
        buckets: as DDP makes them.
        gradients: one per bucket, to measure with.
    """
    spec = settled(spec)
    layouts = {bucket.shapes: i for i, bucket in enumerate(buckets)}
    by_size = sorted(layouts.values(), key=lambda i: buckets[i].numel)
    step = max(1, -(-len(by_size) // MOST_LAYOUTS))
    chosen = by_size[::-1][::step]  # the largest first, as it matters most
    known = {buckets[i].shapes: measure(spec, buckets[i], gradients[i]) for i in chosen}
    return [known.get(b.shapes) or _nearest(list(known.values()), b.numel).scaled(b.numel) for b in buckets]


def _nearest(costs: list[BucketCost], numel: int) -> BucketCost:
    return min(costs, key=lambda cost: abs(cost.numel - numel))


def measure(spec: Reducer, layout: Layout, gradient: Tensor) -> BucketCost:
    """Run the spec alone to time coding, and with one and two other workers to record its messages."""
    whole, memory = _time_alone(spec, layout, gradient)
    two, three = (_record(spec, layout, gradient, workers) for workers in (2, 3))
    messages = messages_of(two, three)
    exchanges = {exchange for exchange, _ in messages}
    decode = 0.0 if exchanges <= {ALL_REDUCE} else min(_time_decode(spec, layout, gradient, exchanges), whole)
    ahead, elsewhere = _time_shift(gradient) if needs_of(spec).lookahead else (0.0, 0)
    return BucketCost(layout.numel, whole - decode, decode, messages, memory + elsewhere, ahead)


def _step(spec: Reducer, layout: Layout, gradient: Tensor, comm: Comm) -> tuple[Callable[[], float], State]:
    """A function that runs one step and returns its seconds, and the state that it uses."""
    state, x, numbers = spec.init(layout, comm), torch.empty_like(gradient), count()
    noisy = Gradients(gradient, layout) if needs_of(spec).squares else None  # such methods are about the noise

    def step() -> float:
        number = next(numbers)
        x.copy_(gradient if noisy is None else noisy.of(comm.rank, number))
        now = Step(layout, number, lr=0.1, squares=None if noisy is None else noisy.squares)
        started = time.perf_counter()
        reduce(spec, now, x, x, state, comm)
        seconds = time.perf_counter() - started
        states.commit(state)
        return seconds

    return step, state


def _steps_before(spec: Reducer) -> int:
    return LATER if needs_of(spec).squares else WARMUP


def _time_alone(spec: Reducer, layout: Layout, gradient: Tensor) -> tuple[float, int]:
    step, state = _step(spec, layout, gradient, _Alone())
    for _ in range(_steps_before(spec)):
        step()
    return statistics.median(step() for _ in range(ROUNDS)), nbytes_of(state)


def _record(spec: Reducer, layout: Layout, gradient: Tensor, workers: int) -> Recorder:
    """The messages that rank 0 sends in one step with this many workers."""

    def work(comm: Comm) -> Recorder:
        recorder = Recorder(comm)
        step, _ = _step(spec, layout, gradient, recorder)
        for _ in range(_steps_before(spec)):
            recorder.clear()
            step()
        return recorder

    return threads.run(workers, work)[0]


def _time_decode(spec: Reducer, layout: Layout, gradient: Tensor, exchanges: set[str]) -> float:
    """Seconds to decode one more payload; 0 if the spec has no compressor of its own."""
    compressor = next((part for part in spec.walk() if isinstance(part, Compressor)), None)
    if compressor is None:
        return 0.0
    state, out = compressor.init(layout, 0), torch.empty_like(gradient)
    for _ in range(WARMUP):
        payload = compressor.encode(gradient, state)
        states.commit(state)
    one, three = (partial(decode_sum, compressor, [payload] * n, 1.0, out, state) for n in (1, 3))
    if ALL_GATHER in exchanges:  # all payloads are decoded together
        return max(0.0, _median_seconds(three) - _median_seconds(one)) / 2
    return _median_seconds(partial(accumulate, compressor, payload, out) if adds_in_place(compressor) else one)


def _median_seconds(work: Callable[[], object]) -> float:
    """The median time of several runs, after one warm-up run."""
    times = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _time_shift(weights: Tensor) -> tuple[float, int]:
    """Seconds to shift the parameters by the residual, and bytes of the shifted copies."""
    shifted, residual = torch.empty_like(weights), torch.zeros_like(weights)
    return _median_seconds(lambda: kernels.on(weights).add_scaled(weights, residual, -0.1, shifted)), shifted.nbytes


def nbytes_of(state: State) -> int:
    """Bytes of all tensors in a state, including scratch; a tensor that occurs twice counts once."""
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
    """A single worker, whose collectives take no time."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def start_all_reduce(self, x: Tensor) -> Pending:
        return _Complete(x)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        raise RuntimeError("a single worker cannot send a message to another one.")

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        pass


class _Complete(Pending):
    """A collective that is complete at once."""

    def __init__(self, x: Tensor):
        self._x = x

    def wait(self) -> Tensor:
        return self._x
