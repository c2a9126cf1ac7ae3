"""Threshold: the elements above one threshold for all of training, with their values.

The simplest sparsifier: Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017, and
Dutta et al., "On the discrepancy between the theoretical analysis and practical implementations of compressed
communication for distributed deep learning", AAAI 2020, compare it with others.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from tersegrad.compressors.identity import Identity
from tersegrad.compressors.strom import require_threshold
from tersegrad.compressors.thresholded import Thresholded
from tersegrad.core import Compressor, State


@dataclass(frozen=True, repr=False)
class Threshold(Thresholded):
    """Sends x wherever |x| > tau. With error feedback, what is small waits until it has added up.

    The bytes of a step are whatever passes: tau is in the units of the gradient and must be found by trying.
    """

    examples: ClassVar[tuple[str, ...]] = ("Threshold(2.0)",)

    tau: float  # higher => fewer elements, later
    values: Compressor = field(default_factory=Identity)  # codec of the values sent

    def __post_init__(self) -> None:
        super().__post_init__()
        require_threshold(self, self.tau)

    def threshold(self, x: Tensor, state: State) -> float:
        """Always the same."""
        return self.tau
