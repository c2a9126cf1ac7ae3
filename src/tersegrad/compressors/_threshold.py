"""Base of methods that send every element above a threshold, and differ in how the threshold is found."""

from abc import abstractmethod

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._sparse import Sparse
from tersegrad.core import State, reserve, scratch
from tersegrad.kernels.ops import FLOAT32_MAX


class Thresholded(Sparse):
    """Sends all elements with |x| > threshold. A vector of zeros sends nothing."""

    @abstractmethod
    def threshold(self, x: Tensor, state: State) -> float | None:
        """The magnitude that an element must exceed; None if ``x`` is found to be non-finite."""

    def select(self, x: Tensor, state: State) -> Tensor | None:
        """All elements above the threshold."""
        threshold = self.threshold(x, state)
        return None if threshold is None else exceeding(x, threshold, state)


class Estimated(Thresholded):
    """Estimates the threshold that a fraction ``ratio`` of the elements exceeds; the count sent varies.

    If no element exceeds the estimate and the vector is not zero (all elements have the same magnitude, say), exact
    top-k selects instead: otherwise such a vector would never be sent.
    """

    ratio: float

    def select(self, x: Tensor, state: State) -> Tensor | None:
        """All elements above the threshold, or the k largest if there are none."""
        chosen = super().select(x, state)
        if chosen is None or chosen.numel() or not x.numel() or kernels.on(x).abs_max(x) == 0:
            return chosen
        return largest(x, count_of(self.ratio, x.numel()), state)


def count_of(ratio: float, n: int) -> int:
    """The number of elements that a ratio stands for: at least one, at most all.

    >>> count_of(0.01, 1000), count_of(0.01, 3), count_of(0.01, 0)
    (10, 1, 0)
    """
    return min(n, max(1, round(ratio * n)))


def exceeding(x: Tensor, threshold: float, state: State) -> Tensor:
    """The positions of all |x| > threshold, ascending, in scratch that grows to the largest count so far."""
    kernel = kernels.on(x)
    threshold = min(threshold, FLOAT32_MAX)  # an infinite threshold would not select an infinity
    chosen = reserve(state, "chosen", x.numel() // 16, torch.int32, x.device)
    (count,) = kernels.read(kernel.above(x, threshold, chosen))
    if count > chosen.numel():
        chosen = reserve(state, "chosen", int(count), torch.int32, x.device)
        kernel.above(x, threshold, chosen)
    return chosen[: int(count)]


def largest(x: Tensor, k: int, state: State) -> Tensor | None:
    """The positions of the exact k largest, in scratch; None if ``x`` is non-finite."""
    kernel = kernels.on(x)
    chosen = scratch(state, "largest", k, torch.int32, x.device)
    candidates = scratch(state, "candidates", kernel.top_k_capacity(x.numel(), k), torch.int32, x.device)
    return chosen if kernel.top_k(x, k, chosen, candidates) >= 0 else None
