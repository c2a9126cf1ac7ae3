"""RedSync: a threshold between the mean and the largest magnitude, found by bisection.

Fang et al., "RedSync: reducing synchronization bandwidth for distributed deep learning training system", JPDC 2019.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._threshold import Estimated, count_of
from tersegrad.compressors.identity import Identity
from tersegrad.core import Compressor, State, param, require_fraction


@dataclass(frozen=True, repr=False)
class RedSync(Estimated):
    """Bisects r in [0, 1] until k to 2 k elements exceed mean + r (largest - mean), or r is known to ``width``.

    Sends the elements above the last threshold tried: usually k to 2 k, and another number if no threshold tried gives
    that many.
    """

    examples: ClassVar[tuple[str, ...]] = ("RedSync(0.1)",)

    ratio: float = param(doc="fraction of elements to send, at least: lower => fewer bytes, larger residual")
    width: float = param(0.001, "interval at which bisection ends: wider => fewer passes, less accurate count")
    values: Compressor = param(doc="codec of the values sent", factory=Identity)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "ratio", "1 % is RedSync(ratio=0.01).")
        require_fraction(self, "width", "Ten halvings are width=0.001, three are width=0.2.")

    def threshold(self, x: Tensor, state: State) -> float | None:
        """Takes one pass for mean and maximum, and one for each threshold tried."""
        n, kernel = x.numel(), kernels.on(x)
        k = count_of(self.ratio, n)
        top, total = kernels.read(kernel.abs_max(x), kernel.moments(x).abs_total)
        if not math.isfinite(top):
            return None
        threshold = mean = total / max(n, 1)
        low, high = 0.0, 1.0
        while high - low > self.width and top > mean:
            middle = (low + high) / 2
            threshold = mean + middle * (top - mean)
            (count,) = kernels.read(kernel.count_above(x, threshold))  # on which the next threshold depends
            if k <= count <= 2 * k:
                break
            low, high = (low, middle) if count < k else (middle, high)
        return threshold
