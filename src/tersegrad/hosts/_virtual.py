"""One virtual worker: its engine and buckets, and what its gradient comes from: batches, generators, module buffers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tersegrad.auto.decisions import Decisions
from tersegrad.comm.torch import NetworkError
from tersegrad.comm.virtual import Hub, VirtualComm
from tersegrad.core import Comm, mix_seed
from tersegrad.core.memory_format import shaped
from tersegrad.engine import Done, Engine, Gradient, Peers
from tersegrad.engine.failure_report import Doing
from tersegrad.hosts._batches import BatchStream
from tersegrad.hosts._randomness import Randomness
from tersegrad.hosts.training import Training
from tersegrad.per_sample import SquaredGradients

ALIGNED = 64  # bytes, of buffers in given memory


def worker_seed(seed: int, worker: int) -> int:
    """What a worker's generators start from: ``torch.manual_seed(worker_seed(seed, rank))`` in a real process."""
    return mix_seed(seed, worker)


class VirtualPeers(Peers):
    """The other workers of a Hub."""

    may_differ = False

    def __init__(self, hub: Hub, rank: int, decisions: Sequence[Mapping[str, Any]] | None):
        self._hub = hub
        self._rank = rank
        self._decisions = decisions

    def watch(self, doing: Callable[[], Doing]) -> None:
        """Nobody asks."""

    def connect(self) -> Comm:
        """See Peers."""
        comm = VirtualComm(self._hub, self._rank)
        Decisions(self._decisions).put(comm)
        return comm

    def agree(self, mine: dict[str, object]) -> str:
        """They are told the same."""
        return "simulated"

    def compare_loaded(self, mine: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """They load one after the other, and are given what belongs together."""
        return {self._rank: mine}

    def explain(self, error: BaseException) -> BaseException:
        """Releases the others, which wait for this worker."""
        if not isinstance(error, NetworkError):
            self._hub.abort(f"worker {self._rank} failed: {type(error).__name__}: {error}")
        return error

    def turn(self) -> AbstractContextManager[None]:
        """One worker's thread runs at a time."""
        return self._hub.turn()

    def abort(self) -> None:
        """Releases all of them."""
        self._hub.abort("the process ends")

    def stop(self) -> None:
        """Nothing runs."""

    def close(self, failed: bool) -> None:
        """Nothing is held."""


class FlatGradients:
    """Buckets as DDP makes them, filled from the parameters' ``.grad``; with squares where they are needed."""

    def __init__(self, names: list[tuple[str, ...]], parameters: dict[str, Tensor], squares: SquaredGradients | None):
        self.names = names
        self._parameters = parameters
        self._sizes = [[parameters[name].numel() for name in bucket] for bucket in names]
        self._dtypes = [parameters[bucket[0]].dtype for bucket in names]
        self._sums = [torch.zeros(sum(sizes)) for sizes in self._sizes] if squares is not None else []
        for bucket, sums in zip(names, self._sums, strict=False):
            assert squares is not None
            squares.place([parameters[name] for name in bucket], sums)

    def buffers(self, memory: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """One flat buffer a bucket for gradients, and one for squares where they are needed; in given ``memory``."""
        wanted = [(sum(sizes), dtype) for sizes, dtype in zip(self._sizes, self._dtypes, strict=True)]
        wanted += [(sums.numel(), sums.dtype) for sums in self._sums]
        found, used = [], 0
        for numel, dtype in wanted:
            nbytes = numel * dtype.itemsize
            part = torch.empty(nbytes, dtype=torch.uint8) if memory is None else memory[used : used + nbytes]
            found.append(part.view(dtype))
            used += -(-nbytes // ALIGNED) * ALIGNED
        return found[: len(self.names)], found[len(self.names) :]

    def views(self, buckets: list[Tensor]) -> dict[str, Tensor]:
        """Every parameter's slice, in its shape."""
        found = {}
        for names, sizes, bucket in zip(self.names, self._sizes, buckets, strict=True):
            for name, part in zip(names, bucket.split(sizes), strict=True):
                found[name] = shaped(part, self._parameters[name])
        return found

    def take(self, views: dict[str, Tensor], squares: list[Tensor]) -> None:
        """Copies all gradients into the views of one worker's buckets, and moves the squares."""
        torch._foreach_copy_(list(views.values()), [self._gradient(name) for name in views])
        copy_all(squares, self._sums)
        for sums in self._sums:
            sums.zero_()

    def _gradient(self, name: str) -> Tensor:
        gradient = self._parameters[name].grad
        if gradient is None:
            raise ValueError(
                f"parameter {name} got no gradient: the loss does not depend on it. Set requires_grad=False for it, or "
                "add 0 * parameter.sum() to the loss."
            )
        if gradient.is_sparse:
            raise ValueError(f"the gradient of {name} is sparse. Make its embedding with sparse=False.")
        return gradient


class LocalGradient:
    """Where one worker's gradient comes from: all that is its own beside the method's state."""

    def __init__(self, rank: int, workers: int, seed: int, training: Training):
        self.module_buffers: list[Tensor] = []  # empty if they are worker 0's
        self.stream = BatchStream(training.batches, rank, workers, worker_seed(seed, rank))
        self._training = training
        self._random = Randomness.seeded(worker_seed(seed, rank))
        self._carried: Any = None

    def backward(self, module_buffers: list[Tensor], before: list[Tensor]) -> float:
        """Leaves this worker's gradient of a step in ``.grad``; returns its loss.

        Args:
            module_buffers: The model's.
            before: What they hold for a worker that has none of its own.
        """
        copy_all(module_buffers, self.module_buffers or before)
        count, total = self._training.accumulate, 0.0
        for _ in range(count):
            batch = self._next_batch()
            with self._random.used():
                loss = self._loss(batch)
                (loss / count if count > 1 else loss).backward()
            total += float(loss.detach()) / count
        copy_all(self.module_buffers, module_buffers)
        return total

    def _next_batch(self) -> Any:
        epoch = self.stream.epoch
        batch = self.stream.next()
        if self.stream.epoch != epoch:
            self._carried = None
        return batch

    def _loss(self, batch: Any) -> Tensor:
        training = self._training
        if training.carries:
            loss, self._carried = training.loss(training.model, batch, self._carried)
        else:
            loss = training.loss(training.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TypeError(
                f"loss(model, batch) gave {what}. It must return one number to call backward on, such as "
                "cross_entropy(model(x), y); with carries=True a pair of it and what is carried."
            )
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Goes on from here."""
        return {
            "random": self._random.state_dict(),
            "stream": self.stream.state_dict(),
            "module_buffers": self.module_buffers,
            "carried": self._carried,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` saved."""
        self._random = Randomness(**saved["random"])
        self.stream.load_state_dict(saved["stream"])
        self.module_buffers = [buffer.clone() for buffer in saved["module_buffers"]]
        self._carried = saved["carried"]


class VirtualWorker:
    """One worker's engine, and the buckets that are handed to it."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def place(self, flat: FlatGradients, memory: Tensor | None = None) -> None:
        """Makes buffers for buckets."""
        self._flat = flat
        self.buckets, self._squares = flat.buffers(memory)
        self.gradients = flat.views(self.buckets)

    def take(self) -> None:
        """Copies the gradient into the buckets."""
        self._flat.take(self.gradients, self._squares)

    def energy(self) -> float:
        """Sum of squares of all that this worker could send now: gradient and residual."""
        return sum(self.engine.energy(names, b) for names, b in zip(self._flat.names, self.buckets, strict=True))

    def submit(self, done: Done) -> None:
        """Hands the buckets to the engine, whose thread goes on while the next worker's gradient is computed."""
        squares: list[Tensor | None] = [*self._squares] or [None] * len(self.buckets)
        for place, (names, bucket) in enumerate(zip(self._flat.names, self.buckets, strict=True)):
            gradient = Gradient(names, bucket, done, squares[place])
            self.engine.submit(gradient, last=place == len(self.buckets) - 1)


def copy_all(into: list[Tensor], tensors: list[Tensor]) -> None:
    """``into`` becomes ``tensors``; both may be empty."""
    if into:
        torch._foreach_copy_(into, tensors)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
