"""The state of all global random generators: torch's on the CPU, Python's and NumPy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass
class Randomness:
    """One worker's generators while another's are in use."""

    torch: Tensor
    python: Any
    numpy: Any

    @staticmethod
    def seeded(seed: int) -> "Randomness":
        """As after ``torch.manual_seed(seed)``, ``random.seed(seed)`` and ``numpy.random.seed(seed % 2**32)``."""
        legacy = np.random.RandomState(seed % 2**32)
        return Randomness(
            torch.Generator().manual_seed(seed).get_state(),
            random.Random(seed).getstate(),
            legacy.get_state(legacy=False),
        )

    @staticmethod
    def now() -> "Randomness":
        """A copy of the generators in use."""
        state = torch.default_generator.get_state()
        return Randomness(state, random.getstate(), np.random.get_state(legacy=False))  # noqa: NPY002

    def copy(self) -> "Randomness":
        """Generators that go on from here by themselves."""
        return Randomness(self.torch, self.python, self.numpy)  # the states themselves are never changed

    @contextmanager
    def used(self) -> Iterator[None]:
        """These generators are in use inside, and go on from there when they are used again (see ``undisturbed``)."""
        self._use()
        try:
            yield
        finally:
            now = Randomness.now()
            self.torch, self.python, self.numpy = now.torch, now.python, now.numpy

    def _use(self) -> None:
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002  # users' code draws from it

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"torch": self.torch, "python": self.python, "numpy": self.numpy}


@contextmanager
def undisturbed() -> Iterator[None]:
    """The generators in use are afterwards as they were before."""
    before = Randomness.now()
    try:
        yield
    finally:
        before._use()
