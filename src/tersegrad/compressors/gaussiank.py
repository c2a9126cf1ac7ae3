"""GaussianK: the threshold of a normal distribution fitted to the gradient, corrected a few times.

Shi et al., "Understanding top-k sparsification in distributed deep learning", arXiv:1911.08772, 2019.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._threshold import Estimated, count_of
from tersegrad.compressors.identity import Identity
from tersegrad.core import Compressor, State, param, require_fraction
from tersegrad.kernels.ops import Moments

CORRECTIONS = 3  # at most; each is a pass that counts


@dataclass(frozen=True, repr=False)
class GaussianK(Estimated):
    """Sends |x| > |mean| + z std, where a normal variable exceeds z in magnitude with probability ``ratio``.

    Up to three times, if the count is not within a third of k, the threshold is halved (too few) or raised by half (too
    many). The elements above the last threshold are sent.
    """

    examples: ClassVar[tuple[str, ...]] = ("GaussianK(0.1)",)

    ratio: float = param(doc="fraction of elements to send, approximately: lower => fewer bytes, larger residual")
    values: Compressor = param(doc="codec of the values sent", factory=Identity)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "ratio", "1 % is GaussianK(ratio=0.01).")

    def threshold(self, x: Tensor, state: State) -> float | None:
        """Takes one pass for mean and standard deviation, and one for each count."""
        n, kernel = x.numel(), kernels.on(x)
        moments = Moments(*kernels.read(*kernel.moments(x)))
        if not math.isfinite(moments.squares):
            return None
        mean = moments.total / max(n, 1)
        deviation = math.sqrt(max(0.0, moments.squares - moments.total * mean) / max(n - 1, 1))
        threshold = abs(mean) - NormalDist().inv_cdf(self.ratio / 2) * deviation
        k = count_of(self.ratio, n)
        for _ in range(CORRECTIONS):
            (count,) = kernels.read(kernel.count_above(x, threshold))  # on which the next threshold depends
            if 2 * k <= 3 * count <= 4 * k:
                break
            threshold *= 0.5 if count < k else 1.5
        return threshold
