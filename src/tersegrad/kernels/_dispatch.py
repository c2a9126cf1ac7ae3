"""Which backend computes an operation."""

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from tersegrad.kernels import ops

Op = Callable[..., Any]

_MODULES = {"cpu": "tersegrad.kernels.cpu"}  # imported on first use: importing Numba takes a while
_REFERENCE = "tersegrad.kernels.reference"


@dataclass(frozen=True, eq=False)
class Backend:
    """Implementations of some operations, or all, for tensors of one type of device."""

    name: str
    device: str
    ops: Mapping[str, Op]


class Kernels:
    """The operations of one type of device, as attributes: its backend's, or else the reference's."""

    def __init__(self, device: str, own: list[Backend]) -> None:
        self._device = device
        self._own = own

    def __getattr__(self, name: str) -> Op:
        """Look an operation up, on its first use only: the result is kept as an attribute."""
        if name not in ops.OPS:
            raise AttributeError(f"there is no kernel called {name!r}")
        for backend in self._own:
            if name in backend.ops:
                break
        else:
            backend = _reference(self._device)
            if getattr(ops, name, None) is not backend.ops[name]:  # sizes are the same on all devices
                text = f"tersegrad has no kernel {name!r} for {self._device} yet: the plain torch reference runs there."
                warnings.warn(text, stacklevel=2)
        setattr(self, name, backend.ops[name])
        return backend.ops[name]


_registered: dict[str, list[Backend]] = {}  # by device, the newest first
_kernels: dict[str, Kernels] = {}


def on(tensor: Tensor) -> Kernels:
    """The kernels for the device of this tensor."""
    device = tensor.device.type
    return _kernels.get(device) or _look_up(device)


def register(device: str, backend: ModuleType | Mapping[str, Op], name: str | None = None) -> Backend:
    """Use these implementations for tensors of a type of device, before those that were registered earlier.

    Args:
        device: the type of a ``torch.device``, such as "cuda".
        backend: a module or a mapping that has operations under their names (``ops.OPS``), some or all of them.
        name: its name in tests; by default that of the module, or of the device.

    Returns:
        The backend, as ``backends`` lists it and ``unregister`` takes it.

    Raises:
        ValueError: if it has no operation, or if a mapping has a name that is not one of ``ops.OPS``.
    """
    found = Backend(name or _name_of(backend, device), device, _ops_of(backend))
    _own(device).insert(0, found)
    _kernels.pop(device, None)
    return found


def unregister(backend: Backend) -> None:
    """Undo ``register``."""
    _own(backend.device).remove(backend)
    _kernels.pop(backend.device, None)


def backends(device: str | None = None) -> list[Backend]:
    """All implementations there are, the reference first.

    Args:
        device: list backends for this type of device only; None: for all. The reference is listed once, for the
            given device, or else for the CPU.
    """
    devices = [device] if device else list(dict.fromkeys([*_MODULES, *_registered]))
    return [_reference(device or "cpu"), *(backend for each in devices for backend in _own(each))]


def _look_up(device: str) -> Kernels:
    return _kernels.setdefault(device, Kernels(device, _own(device)))


def _own(device: str) -> list[Backend]:
    if device not in _registered:
        module = _MODULES.get(device)
        _registered[device] = [_from_module(device, module)] if module else []
    return _registered[device]


def _reference(device: str) -> Backend:
    return _from_module(device, _REFERENCE)


def _from_module(device: str, module: str) -> Backend:
    return Backend(module.rpartition(".")[2], device, _ops_of(importlib.import_module(module)))


def _name_of(backend: ModuleType | Mapping[str, Op], device: str) -> str:
    return backend.__name__.rpartition(".")[2] if isinstance(backend, ModuleType) else device


def _ops_of(backend: ModuleType | Mapping[str, Op]) -> Mapping[str, Op]:
    """Operations by name. A submodule that has the name of an operation is not callable and does not count."""
    if isinstance(backend, ModuleType):
        found = {name: getattr(backend, name) for name in ops.OPS if callable(getattr(backend, name, None))}
    else:
        found = dict(backend)
    if unknown := sorted(set(found) - set(ops.OPS)):
        raise ValueError(f"{unknown} are not kernels; kernels.ops.OPS lists all of them")
    if not found:
        raise ValueError(f"there is no kernel in {backend}")
    return found
