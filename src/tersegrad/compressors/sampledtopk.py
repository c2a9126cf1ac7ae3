"""SampledTopK: the elements above the top-k threshold of a random sample; DGC's selection.

Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training", ICLR 2018.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._sparse import Selection, Sparse
from tersegrad.compressors._threshold import count_of, exceeding, largest, largest_of
from tersegrad.compressors.identity import Identity
from tersegrad.core import Compressor, Layout, Paused, State, mix_seed, param, require_fraction, scratch, stage

TOO_MANY = 4 / 3  # times k: if more pass, the k largest of them are sent
LEAST_SEEN = 64  # expected number of the k largest in a sample, at least: its standard deviation is an eighth


@dataclass(frozen=True, repr=False)
class SampledTopK(Sparse):
    """Sends elements that reach the smallest of a sample's top k; if more than 4/3 k do, the k largest of those.

    If fewer than k do, fewer are sent.
    """

    examples: ClassVar[tuple[str, ...]] = ("SampledTopK(0.1, sample=0.5)", "SampledTopK(0.02)")

    ratio: float = param(doc="fraction of elements to send, approximately: lower => fewer bytes, larger residual")
    sample: float = param(0.01, "fraction of elements sampled for the threshold: lower => faster, less accurate count")
    values: Compressor = param(doc="codec of the values sent", factory=Identity)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "ratio", "0.1 % is SampledTopK(ratio=0.001).")
        require_fraction(self, "sample", "The usual is sample=0.01.")

    def init(self, layout: Layout, seed: int) -> State:
        """The seed and the number of encodings so far determine all samples."""
        return {**super().init(layout, seed), "seed": seed, "calls": 0}

    def selecting(self, x: Tensor, state: State) -> Paused[Selection | None]:
        """Estimate a threshold from a sample, select, and select again among those if too many passed."""
        n = x.numel()
        k, seen = count_of(self.ratio, n), self.sample_size(n)
        stage(state, calls=state["calls"] + 1)
        if seen == n:
            return largest(x, k, state)
        threshold = yield from self._threshold(x, seen, state)
        if threshold is None:
            return None
        selected = yield from exceeding(x, threshold, state)
        too_many = selected.positions.numel() > TOO_MANY * k
        return (yield from largest_of(selected, x, k, state)) if too_many else selected

    def sample_size(self, n: int) -> int:
        """How many of n elements are sampled."""
        return min(n, max(round(self.sample * n), math.ceil(LEAST_SEEN / self.ratio)))

    def _threshold(self, x: Tensor, seen: int, state: State) -> Paused[float | None]:
        """The largest number below the smallest of the sample's top k, or zero; None if the sample is non-finite."""
        kernel = kernels.on(x)
        positions = scratch(state, "positions", seen, torch.int32, x.device)
        kernel.stratified(x.numel(), mix_seed(state["seed"], state["calls"], x.numel()), positions)
        sample = scratch(state, "sample", seen, torch.float32, x.device)
        kernel.gather(x, positions, sample)
        best = largest(sample, count_of(self.ratio, seen), state, "largest sampled")
        found, smallest = yield best.found, sample.index_select(0, best.positions).abs_().min()
        if found < 0:
            return None
        return float(np.nextafter(np.float32(smallest), np.float32(0)))
