"""Kernels: one dispatch by device. ``reference`` (plain torch) defines each result, ``cpu`` (Numba) is the fast one.

Every function is in both, under the same name in the same file, and the two agree.
"""

import importlib
import warnings
from functools import cache
from types import ModuleType

from torch import Tensor


def on(tensor: Tensor) -> ModuleType:
    """The module whose kernels run where this tensor lives."""
    return _backend(tensor.device.type)


@cache
def _backend(device: str) -> ModuleType:
    if device == "cpu":
        return importlib.import_module("tersegrad.kernels.cpu")  # here, not above: importing Numba takes a while
    warnings.warn(f"tersegrad has no kernels for {device} yet: the plain torch reference runs there.", stacklevel=3)
    return importlib.import_module("tersegrad.kernels.reference")
