"""All kernel backends there are, for tests: a new one is tested by being registered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tersegrad import kernels


class Runner:
    """A backend's operations on tensors of the CPU, wherever it computes; answers come as Python numbers.

    What it does not have is the reference's, so that those it has are tested with whatever goes with them.
    """

    def __init__(self, backend: kernels.Backend, moves: bool | None = None) -> None:
        self.backend = backend
        self.moves = backend.device != "cpu" if moves is None else moves

    def __repr__(self) -> str:
        return self.backend.name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.backend.ops:
            return getattr(reference, name)
        op = self.backend.ops[name]

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.moves:
                return _plain(op(*args, **kwargs))
            there = _Elsewhere(self.backend.device)
            try:
                return _plain(op(*map(there.send, args), **{key: there.send(arg) for key, arg in kwargs.items()}))
            finally:
                there.bring_back()

        return run


class _Elsewhere:
    """Copies of whole memories on a device, so that also what lies around a tensor can be looked at afterwards."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def send(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        memory = argument.untyped_storage()
        if memory.data_ptr() not in self.pairs:
            here = torch.empty(0, dtype=torch.uint8).set_(memory)
            self.pairs[memory.data_ptr()] = here, here.to(self.device, copy=True)
        copy = self.pairs[memory.data_ptr()][1].view(argument.dtype)
        return copy.as_strided(argument.size(), argument.stride(), argument.storage_offset())

    def bring_back(self) -> None:
        for here, there in self.pairs.values():
            here.copy_(there)


def _plain(answer: Any) -> Any:
    if isinstance(answer, tuple):
        numbers = kernels.read(*answer)
        return type(answer)(*numbers) if hasattr(answer, "_fields") else numbers
    return answer if answer is None else kernels.read(answer)[0]


class _Reference(Runner):
    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.backend.ops:
            raise AttributeError(name)
        return super().__getattr__(name)


reference = _Reference(kernels.backends()[0])


def runners(*ops: str) -> list[Runner]:
    """Of all backends that have one of these operations or more, the reference first."""
    known = [backend for backend in kernels.backends()[1:] if any(op in backend.ops for op in ops)]
    return [reference, *map(Runner, known)]


def every(*ops: str) -> Any:
    """Runs a test with each backend that has one of these operations or more, as ``kernel``."""
    return pytest.mark.parametrize("kernel", runners(*ops), ids=repr)


def others(*ops: str) -> Any:
    """As ``every``, without the reference: for tests that compare with it."""
    return pytest.mark.parametrize("kernel", runners(*ops)[1:], ids=repr)
