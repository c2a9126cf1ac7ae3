"""A forked process that computes the gradients of some virtual workers, on the same weights in shared memory."""

import io
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from tersegrad.hosts._virtual import ALIGNED, FlatGradients, LocalGradient, VirtualWorker
from tersegrad.per_sample import SquaredGradients

Serve = Callable[[str, tuple[Any, ...]], Any]


class GradientServer:
    """What runs in the forked process: it answers calls, each with one result."""

    def __init__(
        self,
        gradients: dict[int, LocalGradient],
        parameters: dict[str, Tensor],
        module_buffers: list[Tensor],
        squares: SquaredGradients | None,
        shifts: bool,
    ):
        self._gradients = gradients
        self._parameters = parameters
        self._module_buffers = module_buffers
        self._squares = squares
        self.before = [buffer.clone().share_memory_() for buffer in module_buffers]  # of worker 0
        self.memory = {rank: _shared(_room(parameters, squares is not None)) for rank in gradients}
        self.shifted = {name: _shared_like(p) for name, p in parameters.items()} if shifts else {}
        self._homes = {name: p.data for name, p in parameters.items()}
        self._workers: dict[int, tuple[FlatGradients, dict[str, Tensor], list[Tensor]]] = {}

    def answer(self, what: str, arguments: tuple[Any, ...]) -> Any:
        """One call."""
        calls: dict[str, Callable[..., Any]] = {
            "place": self._place,
            "gradient": self._gradient,
            "state": self._state,
            "load": self._load,
        }
        return calls[what](*arguments)

    def _place(self, names: list[tuple[str, ...]]) -> None:
        flat = FlatGradients(names, self._parameters, self._squares)
        for rank, memory in self.memory.items():
            buckets, squares = flat.buffers(memory)
            self._workers[rank] = flat, flat.views(buckets), squares

    def _gradient(self, rank: int, shifted: list[str]) -> tuple[float, list[int]]:
        """Leaves a worker's gradient in its memory; its loss, and the lengths of its epochs so far."""
        for parameter in self._parameters.values():
            parameter.grad = None
        with self._shift(shifted):
            loss = self._gradients[rank].backward(self._module_buffers, self.before)
        flat, views, squares = self._workers[rank]
        flat.take(views, squares)
        return loss, self._gradients[rank].stream.lengths

    @contextmanager
    def _shift(self, names: list[str]) -> Iterator[None]:
        for name in names:
            self._parameters[name].data = self.shifted[name]
        try:
            yield
        finally:
            for name in names:
                self._parameters[name].data = self._homes[name]

    def _state(self, rank: int) -> bytes:
        return _packed(self._gradients[rank].state_dict())

    def _load(self, rank: int, saved: bytes) -> None:
        self._gradients[rank].load_state_dict(unpacked(saved))


class GradientProcess:
    """Calls a server in a forked process."""

    def __init__(self, server: GradientServer, others: Sequence["GradientProcess"]):
        self._server = server
        self.ranks = list(server.memory)
        self._pipe, theirs = Pipe()
        self._lock = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            for other in (*others, self):
                other._pipe.close()  # else nobody would notice that the first process has ended
            _serve(server.answer, theirs)
        theirs.close()

    def place(self, names: list[tuple[str, ...]], flat: FlatGradients, workers: Sequence[VirtualWorker]) -> None:
        """Both processes put the buckets of these workers at the same places in shared memory."""
        self._call("place", names)
        for rank in self.ranks:
            workers[rank].place(flat, self._server.memory[rank])

    def take_module_buffers(self, buffers: list[Tensor]) -> None:
        """What the model's buffers hold before the step."""
        for mine, theirs in zip(self._server.before, buffers, strict=True):
            mine.copy_(theirs)

    def gradient(self, rank: int, shifts: Iterable[tuple[str, Callable[[Tensor], None]]]) -> tuple[float, list[int]]:
        """One worker's loss, and the lengths of its epochs; its gradient is in its buckets.

        Args:
            rank: Which worker.
            shifts: Parameters that are shifted for it, and what writes the shifted weights.
        """
        names = []
        for name, write in shifts:
            write(self._server.shifted[name])
            names.append(name)
        found: tuple[float, list[int]] = self._call("gradient", rank, names)
        return found

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Of the worker's LocalGradient."""
        found: dict[str, Any] = unpacked(self._call("state", rank))
        return found

    def load_state_dict(self, rank: int, saved: dict[str, Any]) -> None:
        """The same."""
        self._call("load", rank, _packed(saved))

    def _call(self, what: str, *arguments: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send((what, arguments))
                worked, result = self._pipe.recv()
            except (EOFError, OSError):
                raise RuntimeError(
                    f"the process that computes the gradients of workers {self.ranks} has ended. Was it killed, or out "
                    "of memory? With processes=1 all is done in one process."
                ) from None
        if not worked:
            raise result
        return result

    def close(self) -> None:
        """Ends the process. Harmless twice."""
        if self.pid:
            self._pipe.close()
            os.waitpid(self.pid, 0)
            self.pid = 0


def _serve(answer: Serve, pipe: Connection) -> None:
    """Answers until the other end is closed. Never returns: what the first process has to do at its end is not ours."""
    try:
        while True:
            what, arguments = pipe.recv()
            try:
                reply = True, answer(what, arguments)
            except Exception as error:
                reply = False, _sendable(error)
            pipe.send(reply)
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    finally:
        os._exit(0)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _packed(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpacked(saved: bytes) -> dict[str, Any]:
    """From our own other process, so anything may be in it."""
    found: dict[str, Any] = torch.load(io.BytesIO(saved), weights_only=False)
    return found


def _room(parameters: dict[str, Tensor], squares: bool) -> int:
    """Bytes for the buckets of all parameters, however they are divided."""
    return sum(_padded(p.nbytes) + (_padded(4 * p.numel()) if squares else 0) for p in parameters.values())


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


def _shared(nbytes: int) -> Tensor:
    found: Tensor = torch.empty(nbytes, dtype=torch.uint8).share_memory_()
    return found


def _shared_like(parameter: Tensor) -> Tensor:
    """Of the parameter's memory format too."""
    found: Tensor = torch.empty_like(parameter.data).share_memory_()
    return found
