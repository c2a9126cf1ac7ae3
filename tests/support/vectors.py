"""Vectors of all kinds that selections and sums must cope with."""

import math

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

SIZES = [0, 1, 2, 15, 16, 17, 63, 64, 65, 1000, 4097, 100_003]
LONG = (1 << 20) + 77  # from 2^20 on, the CPU kernels stream and select in one pass
BROKEN = [math.nan, -math.nan, math.inf, -math.inf]


def gaussian(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def layers(n):
    """Slices of very different scales, as gradients of a deep network are."""
    scales = torch.exp(2 * gaussian(20, seed=1)).repeat_interleave(n // 20 + 1)[:n]
    return gaussian(n) * scales


def one_nonzero(n):
    x = torch.zeros(n)
    x[n // 3 : n // 3 + 1] = -1e-45
    return x


SHAPES = {
    "gaussian": gaussian,
    "layers": layers,
    "zeros": torch.zeros,
    "signed zeros": lambda n: torch.zeros(n) * gaussian(n),
    "constant": lambda n: torch.full((n,), 2.5),
    "all negative": lambda n: -gaussian(n).abs(),
    "denormal": lambda n: gaussian(n) * 1e-42,
    "huge": lambda n: gaussian(n).clamp(-1, 1) * 3e38,
    "few levels": lambda n: (gaussian(n) * 2).round(),
    "ascending": lambda n: torch.arange(n, dtype=torch.float32),
    "descending": lambda n: -torch.arange(n, 0, -1, dtype=torch.float32),
    "one non-zero": one_nonzero,
    "sparse": lambda n: gaussian(n) * (gaussian(n, seed=1) > 2.5),
    "periodic": lambda n: gaussian(n) * (torch.arange(n) % 256 == 0),
}


def any_floats():
    elements = st.floats(width=32)
    arrays = st_numpy.arrays(np.float32, st.integers(0, 300), elements=elements, fill=st.nothing())
    return arrays.map(torch.from_numpy)
