"""What the ring and the two-shot exchange are tested with: run by threads and by real processes."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tersegrad import specs
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered, Tap
from tersegrad.comm.torch import TorchComm
from tersegrad.compressors import Identity
from tersegrad.core import Comm, Compressor, Layout, Payload, Pending, Reducer, State, Step, Summable, reduce, state
from tersegrad.testing import inputs


@dataclass(frozen=True, repr=False)
class _Tens(Compressor):
    """Rounds to whole tens, in float32: coarse, and easy to reckon with. Payloads cannot be added."""

    def init(self, layout: Layout, seed: int) -> State:
        return {"seed": seed}

    def encode(self, x: Tensor, state: State) -> Payload:
        return Identity().encode(tens(x), state)

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        Identity().decode_add(payload, acc, scale)


def tens(x: Tensor) -> Tensor:
    return (x / 10).round() * 10


@dataclass(frozen=True, repr=False)
class _Logged(_Tens):
    """Notes every encoding, where the state has a log."""

    def encode(self, x: Tensor, state: State) -> Payload:
        state.get("_log", []).append("encode")
        return super().encode(x, state)


@dataclass(frozen=True, repr=False)
class _LoggedSum(_Logged, Summable):
    dtype: ClassVar[torch.dtype] = torch.float32


class Logging(Tap):
    """Notes when messages are started and waited for."""

    def __init__(self, inner: Comm, log: list[str]):
        super().__init__(inner)
        self.log = log

    def observe(self, traffic, started, overlapped=0.0):
        self.log.append("waited")

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        self.log.append("start")
        return super().start_shift(x, into, by)


def events(reducer: Reducer, size: int) -> list[str]:
    """What worker 0 did in one step, in order: start, encode, waited. The reducer is made of a ``_Logged``."""
    log: list[str] = []

    def work(comm: Comm) -> None:
        layout = Layout.flat(1000)
        memory = reducer.init(layout, comm)
        if comm.rank == 0:
            comm = Logging(comm, log)
            for segment in memory["segments"].values():
                segment["inner"]["_log"] = log
        x = torch.linspace(-500, 500, 1000)
        reduce(reducer, Step(layout), x, x, memory, comm)

    threads.run(size, work)
    return log


def sent_bytes(reducer: Reducer, size: int, numel: int) -> list[int]:
    """Bytes that leave each worker in one step."""

    def work(comm: Comm) -> int:
        meter, layout = Metered(comm), Layout.flat(numel)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
        reduce(reducer, Step(layout), x, torch.empty_like(x), reducer.init(layout, comm), meter)
        return meter.total.sent

    return threads.run(size, work)


def outcome(comm: Comm, text: str, numel: int, steps: int = 3) -> list[list[int]]:
    """The bits of the mean and of the rest after each step."""
    reducer, layout = specs.parse_reducer(text), Layout(("a", "b"), ((numel // 3,), (numel - numel // 3,)), seed=5)
    memory = reducer.init(layout, comm)
    gradient, bits = inputs.laplace(numel), []
    for step in range(steps):
        x = gradient(comm.rank, step)
        out = torch.empty_like(x)
        reduce(reducer, Step(layout, step), x, out, memory, comm)
        state.commit(memory)
        bits += [out.view(torch.int32).tolist(), x.view(torch.int32).tolist()]
    return bits


def over_gloo(text: str, numel: int) -> list[list[int]]:
    return outcome(TorchComm(dist.group.WORLD), text, numel)


class Corrupting(Tap):
    """One worker's messages, changed on their way."""

    def __init__(self, inner: Comm, change: Callable[[Tensor], Tensor]):
        super().__init__(inner)
        self.change = change

    def observe(self, traffic, started, overlapped=0.0):
        pass

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        return super().start_shift(self.change(x.clone()), into, by)


def reduced(reducer: Reducer, xs: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Means and rests of all workers."""

    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        x, layout = xs[comm.rank].clone(), Layout.flat(xs[0].numel())
        out = torch.empty_like(x)
        reduce(reducer, Step(layout), x, out, reducer.init(layout, comm), comm)
        return out, x

    return threads.run(len(xs), work)


def flip_a_byte(frame: Tensor) -> Tensor:
    frame[-2] ^= 1
    return frame


def zeros(frame: Tensor) -> Tensor:
    return frame.zero_()


def truncated(frame: Tensor) -> Tensor:
    return frame[:-3]


def only_three_bytes(frame: Tensor) -> Tensor:
    return frame[:3]


def lying_length(frame: Tensor) -> Tensor:
    frame[48:56] = torch.tensor([255] * 7 + [0], dtype=torch.uint8)
    return frame


WRONG = {
    "rank 2's frame is corrupt": flip_a_byte,
    r"rank 2 sent b'\\x00\\x00\\x00\\x00'": zeros,
    "rank 2's frame is corrupt: checksum": truncated,
    r"rank 2 sent b'TGR\\x00'": only_three_bytes,
    "rank 2 announced a frame of": lying_length,
}


def corrupt_over_gloo(text: str, seconds: float) -> str:
    """Rank 2 sends wrong frames; every rank says how it ended, and none waits longer than the group's timeout."""
    comm: Comm = TorchComm(dist.new_group(timeout=timedelta(seconds=seconds)))
    if comm.rank == 2:
        comm = Corrupting(comm, flip_a_byte)
    dist.barrier()  # on the usual group, which is more patient: the seconds are not for a machine that is busy
    try:
        outcome(comm, text, 1000)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"
