"""Strom: where the gradient exceeds a threshold, its sign; one threshold for all of training.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.compressors._signs import Signs, require_threshold
from tersegrad.compressors._sparse import Sparse
from tersegrad.compressors._threshold import exceeding
from tersegrad.core import Compressor, State, param


@dataclass(frozen=True, repr=False)
class Strom(Sparse):
    """Sends sign(x) * tau wherever |x| > tau, at most once an element and step; with error feedback the rest stays.

    The bytes of a step are whatever passes: tau is in the units of the gradient and must be found by trying.
    """

    examples: ClassVar[tuple[str, ...]] = ("Strom(0.5)", "Strom(2.0)")

    tau: float = param(doc="higher => fewer elements, stage")

    def __post_init__(self) -> None:
        require_threshold(self, self.tau)

    @property
    def values(self) -> Compressor:  # type: ignore[override]
        """The sign alone."""
        return Signs(self.tau)

    def select(self, x: Tensor, state: State) -> Tensor | None:
        """All that exceed tau."""
        return exceeding(x, self.tau, state)
