"""Base of methods that send every element above a threshold, and differ in how the threshold is found."""

from abc import abstractmethod

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._sparse import Selection, Sparse
from tersegrad.core import Paused, State, reserve, scratch
from tersegrad.kernels.ops import FLOAT32_MAX


class Thresholded(Sparse):
    """Sends all elements with |x| > threshold. A vector of zeros sends nothing."""

    @abstractmethod
    def threshold(self, x: Tensor, state: State) -> float | None:
        """The magnitude that an element must exceed; None if ``x`` is found to be non-finite."""

    def selecting(self, x: Tensor, state: State) -> Paused[Selection | None]:
        """All elements above the threshold."""
        threshold = self.threshold(x, state)
        return None if threshold is None else (yield from exceeding(x, threshold, state))


class Estimated(Thresholded):
    """Estimates the threshold that a fraction ``ratio`` of the elements exceeds; the count sent varies.

    If no element exceeds the estimate and the vector is not zero (all elements have the same magnitude, say), exact
    top-k selects instead: otherwise such a vector would never be sent.
    """

    ratio: float

    def selecting(self, x: Tensor, state: State) -> Paused[Selection | None]:
        """All elements above the threshold, or the k largest if there are none."""
        selected = yield from super().selecting(x, state)
        if selected is None or selected.positions.numel() or not x.numel():
            return selected
        (top,) = yield (kernels.on(x).abs_max(x),)
        return largest(x, count_of(self.ratio, x.numel()), state) if top else selected


def count_of(ratio: float, n: int) -> int:
    """The number of elements that a ratio stands for: at least one, at most all.

    >>> count_of(0.01, 1000), count_of(0.01, 3), count_of(0.01, 0)
    (10, 1, 0)
    """
    return min(n, max(1, round(ratio * n)))


def exceeding(x: Tensor, threshold: float, state: State) -> Paused[Selection]:
    """The positions of all |x| > threshold, ascending, in scratch that grows to the largest count so far.

    It pauses: the host must know their number before it can launch anything on them.
    """
    kernel = kernels.on(x)
    threshold = min(threshold, FLOAT32_MAX)  # an infinite threshold would not select an infinity
    chosen = reserve(state, "chosen", x.numel() // 16, torch.int32, x.device)
    (count,) = yield (kernel.above(x, threshold, chosen),)
    if count > chosen.numel():
        chosen = reserve(state, "chosen", int(count), torch.int32, x.device)
        kernel.above(x, threshold, chosen)
    return Selection(chosen[: int(count)])


def largest(x: Tensor, k: int, state: State, key: str = "largest") -> Selection:
    """The positions of the exact k largest, in scratch with this key."""
    kernel = kernels.on(x)
    chosen = scratch(state, key, k, torch.int32, x.device, zeroed=True)
    candidates = scratch(state, "candidates", kernel.top_k_capacity(x.numel(), k), torch.int32, x.device)
    return Selection(chosen, kernel.top_k(x, k, chosen, candidates))


def largest_of(selected: Selection, x: Tensor, k: int, state: State) -> Paused[Selection | None]:
    """The k largest of those selected; None if one of them is non-finite.

    It pauses: as long as ``found`` is not known, the positions may be of a longer vector.
    """
    passed = scratch(state, "passed", selected.positions.numel(), torch.float32, x.device)
    kernels.on(x).gather(x, selected.positions, passed)
    best = largest(passed, k, state, "largest passed")
    (found,) = yield (best.found,)
    return Selection(selected.positions.index_select(0, best.positions)) if found >= 0 else None
