"""What methods share that send all that exceeds a threshold: they only say which threshold."""

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
        """What an element must exceed in magnitude; None if ``x`` is seen not to be finite."""

    def select(self, x: Tensor, state: State) -> Tensor | None:
        """All that exceed the threshold."""
        threshold = self.threshold(x, state)
        return None if threshold is None else exceeding(x, threshold, state)


class Estimated(Thresholded):
    """Guesses the threshold that a fraction ``ratio`` exceeds; the count is what it is, and never zero for ever.

    Where nothing exceeds the guess and not all is zero, the guess says nothing about this vector (they are all of the
    same magnitude, say), and exact top-k decides.
    """

    ratio: float

    def select(self, x: Tensor, state: State) -> Tensor | None:
        """All that exceed the threshold, or the largest if none does."""
        chosen = super().select(x, state)
        if chosen is None or chosen.numel() or not x.numel() or kernels.on(x).abs_max(x) == 0:
            return chosen
        return largest(x, count_of(self.ratio, x.numel()), state)


def count_of(ratio: float, n: int) -> int:
    """The k that a ratio asks for: at least one element, at most all.

    >>> count_of(0.01, 1000), count_of(0.01, 3), count_of(0.01, 0)
    (10, 1, 0)
    """
    return min(n, max(1, round(ratio * n)))


def exceeding(x: Tensor, threshold: float, state: State) -> Tensor:
    """The positions of all |x| > threshold, ascending, in scratch that grows with the most there ever were."""
    kernel = kernels.on(x)
    threshold = min(threshold, FLOAT32_MAX)  # above it would be infinite, and hide an infinity
    chosen = reserve(state, "chosen", x.numel() // 16, torch.int32, x.device)
    (count,) = kernels.read(kernel.above(x, threshold, chosen))
    if count > chosen.numel():
        chosen = reserve(state, "chosen", int(count), torch.int32, x.device)
        kernel.above(x, threshold, chosen)
    return chosen[: int(count)]


def largest(x: Tensor, k: int, state: State) -> Tensor | None:
    """The positions of the k largest, exactly, in scratch; None if ``x`` is not finite."""
    kernel = kernels.on(x)
    chosen = scratch(state, "largest", k, torch.int32, x.device)
    candidates = scratch(state, "candidates", kernel.top_k_capacity(x.numel(), k), torch.int32, x.device)
    return chosen if kernel.top_k(x, k, chosen, candidates) >= 0 else None
