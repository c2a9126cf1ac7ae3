"""Kernels, looked up by device and by operation.

``reference`` (plain torch, any device) defines each result, ``cpu`` (Numba) computes it quickly. ``on(tensor)`` takes
each operation from the backend of the tensor's device, and from the reference where that backend has none. Numbers
that an operation returns to the host (an ``Answer``) are read with ``read``. Names, layouts and argument checks that
all backends share are in ``ops``.
"""

from tersegrad.kernels._dispatch import Backend, Kernels, backends, on, register, unregister
from tersegrad.kernels.ops.answers import Answer, read

__all__ = ["Answer", "Backend", "Kernels", "backends", "on", "read", "register", "unregister"]
