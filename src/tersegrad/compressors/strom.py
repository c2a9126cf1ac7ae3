"""Strom: the sign of every element above a threshold, which is the same for all of training.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tersegrad.compressors._signs import Signs, require_threshold
from tersegrad.compressors._sparse import Selection, Sparse
from tersegrad.compressors._threshold import exceeding
from tersegrad.core import Compressor, Paused, State, param


@dataclass(frozen=True, repr=False)
class Strom(Sparse):
    """Sends sign(x) * tau wherever |x| > tau, at most once per element and step; use it with error feedback.

    The number of bytes varies from step to step. tau is in the units of the gradient and must be tuned.
    """

    examples: ClassVar[tuple[str, ...]] = ("Strom(0.5)", "Strom(2.0)")

    tau: float = param(doc="threshold, and magnitude sent: higher => fewer elements, sent later")

    def __post_init__(self) -> None:
        require_threshold(self, self.tau)

    @property
    def values(self) -> Compressor:  # type: ignore[override]
        """The codec of the values sent: the sign alone."""
        return Signs(self.tau)

    def selecting(self, x: Tensor, state: State) -> Paused[Selection | None]:
        return (yield from exceeding(x, self.tau, state))
