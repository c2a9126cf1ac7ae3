"""Threshold: the elements above one threshold for all of training, with their values.

The simplest sparsifier: Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017, and
Dutta et al., "On the discrepancy between the theoretical analysis and practical implementations of compressed
communication for distributed deep learning", AAAI 2020, compare it with others.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.compressors._signs import require_threshold
from tersegrad.compressors._threshold import Thresholded
from tersegrad.compressors.identity import Identity
from tersegrad.core import Compressor, State, param


@dataclass(frozen=True, repr=False)
class Threshold(Thresholded):
    """Sends x wherever |x| > tau. With error feedback, small elements add up until they are sent.

    The number of bytes varies from step to step. tau is in the units of the gradient and must be tuned.
    """

    examples: ClassVar[tuple[str, ...]] = ("Threshold(2.0)",)

    tau: float = param(doc="threshold: higher => fewer elements, sent later")
    values: Compressor = param(doc="codec of the values sent", factory=Identity)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_threshold(self, self.tau)

    def threshold(self, x: Tensor, state: State) -> float:
        return self.tau
