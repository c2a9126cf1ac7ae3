"""TopK: the elements of largest magnitude, exactly.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Stich et al., "Sparsified SGD
with memory", NeurIPS 2018.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._sparse import Selection, Sparse
from tersegrad.compressors.identity import Identity
from tersegrad.core import Compressor, Paused, State, Sum, param, require_fraction, scratch
from tersegrad.core.pausing import done


@dataclass(frozen=True, repr=False)
class TopK(Sparse):
    """Sends the k = max(1, round(ratio * n)) elements of largest magnitude; ties go to the lowest positions."""

    examples: ClassVar[tuple[str, ...]] = ("TopK(0.1)", "TopK(0.01)", "TopK(0.1, values=BF16())", "TopK(1.0)")

    ratio: float = param(doc="fraction of elements sent: lower => fewer bytes, larger residual")
    values: Compressor = param(doc="codec of the values sent", factory=Identity)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction(self, "ratio", "1 % is TopK(ratio=0.01).")

    def selecting(self, x: Tensor, state: State) -> Paused[Selection | None]:
        """Exact selection (``kernels/*/select.py``)."""
        chosen, candidates = self._buffers(x, state)
        return done(Selection(chosen, kernels.on(x).top_k(x, chosen.numel(), chosen, candidates)))

    def selecting_sum(self, x: Sum, state: State) -> Paused[Selection | None]:
        """Add and select in one pass (``kernels/*/topk_of_sum.py``)."""
        chosen, candidates = self._buffers(x.total, state)
        found = kernels.on(x.total).add_top_k(x.a, x.b, chosen.numel(), x.total, chosen, candidates)
        return done(Selection(chosen, found))

    def _buffers(self, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Scratch for the selected positions, and for the candidates."""
        n = x.numel()
        k = min(n, max(1, round(self.ratio * n)))
        capacity = kernels.on(x).top_k_capacity(n, k)
        return (
            scratch(state, "chosen", k, torch.int32, x.device, zeroed=True),
            scratch(state, "candidates", capacity, torch.int32, x.device),
        )
