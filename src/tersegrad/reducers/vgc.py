"""VGC: an element is sent when it is unambiguous: when its square exceeds alpha times its estimated variance.

Tsuzuku, Imachi and Akiba, "Variance-based gradient compression for efficient distributed deep learning", ICLR 2018
workshop track.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors import words
from tersegrad.compressors.coded import Coded, group_lengths
from tersegrad.compressors.powers import _Powers, faint
from tersegrad.compressors.sparse import Sparse
from tersegrad.compressors.strom import _Signs, require_threshold
from tersegrad.core import Bucket, Comm, Compressor, Payload, Reducer, State, later, require, reserve, scratch, spare
from tersegrad.kernels.reference.variance import LARGEST
from tersegrad.reducers.allgather import AllGather

SQUARES = ("samples", "microbatch")
ROUNDINGS = ("feedback", "drop")
LAYOUTS = ("packed", "words")


@dataclass(frozen=True, repr=False)
class VGC(Reducer):
    """Sends x_i when x_i^2 > alpha * v_i, where v_i sums the squares of what each sample adds to x_i.

    v += squares of this step;  sent: v = 0;  not sent: v *= zeta

    ``x`` is the total of what was not sent yet, so write ``ErrorFeedback(VGC())``: its residual is the paper's r. With
    ``tau`` an element must also exceed tau, and +-tau is sent (the hybrid with Strom's method); then
    v = max(v - 2 |x| tau + tau^2, 0), with x before tau is taken off.

    Values travel as signed powers of two in 4 bits, against the largest of their tensor that is sent in this step. What
    is more than 7 binades below it is not sent, and waits. Only ``bucket.squares`` tells single samples apart:
    ``attach`` gathers it (``per_sample.py``).
    """

    examples: ClassVar[tuple[str, ...]] = (
        "VGC(alpha=1.0)",
        "ErrorFeedback(VGC(alpha=3.0))",
        "ErrorFeedback(VGC(alpha=3.0, rounding='drop'))",
        "ErrorFeedback(VGC(alpha=3.0, tau=0.05, squares='microbatch'))",
        "ErrorFeedback(VGC(alpha=3.0, layout='words'))",
        "ErrorFeedback(VGC(alpha=3.0, values=BF16()))",
    )

    alpha: float = 1.5  # higher => fewer elements, later; 0: everything
    zeta: float = 0.999  # decay of the variance of what is not sent; lower => sooner
    tau: float | None = None  # None: the value itself is sent; a number: +-tau, where it is exceeded
    rounding: str = "feedback"  # what a value loses by rounding stays behind ("feedback") or is forgotten ("drop")
    squares: str = "samples"  # whose variance: of single samples, or of the gradients of whole backward passes
    values: Compressor | None = None  # None: 4-bit powers of two; else the codec of the values
    layout: str = "packed"  # "words": one 32-bit word an element, as in the paper, to compare ratios

    def __post_init__(self) -> None:
        for name, low, high in (("alpha", 0.0, math.inf), ("zeta", 0.0, 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= min(high, 1e30):
                raise ValueError(f"VGC({name}={value!r}): {name} is a number from {low:g} to {high:g}.")
        for name, choices in (("rounding", ROUNDINGS), ("squares", SQUARES), ("layout", LAYOUTS)):
            if getattr(self, name) not in choices:
                allowed = " or ".join(map(repr, choices))
                raise ValueError(f"VGC({name}={getattr(self, name)!r}): write {allowed}.")
        if self.tau is not None:
            require_threshold(self, self.tau)
        if self.values is not None:
            require(self, "values", Compressor, "Write e.g. values=BF16(), or leave it out for 4 bits.")
            if self.tau is not None or self.layout == "words":
                raise ValueError(
                    f"VGC(values={self.values!r}): with tau only signs are sent, and words hold 4 bits. "
                    "Leave values out, or leave tau and layout out."
                )
        if self.tau is not None and self.rounding == "drop":
            raise ValueError("VGC(tau=..., rounding='drop'): with tau nothing is rounded. Leave rounding out.")

    @property
    def conserves(self) -> bool:
        """Not if the rounding is forgotten."""
        return self.rounding == "feedback" and self._exchange.conserves

    @property
    def _exchange(self) -> Reducer:
        coded: Coded = _Powers() if self.tau is None else _Signs(self.tau)
        return AllGather(_Words(coded) if self.layout == "words" else _Picked(self.values or coded))

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """No variance yet."""
        return {"variance": torch.zeros(bucket.numel), "exchange": self._exchange.init(bucket, comm)}

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """Test every element, send those that pass; the rest stays in ``x``."""
        offsets = torch.tensor(bucket.offsets, device=x.device)
        variance = spare(state, "variance")
        positions = self._select(bucket, x, offsets, variance, state)
        later(state, variance=variance)
        state["exchange"] |= {"_positions": positions, "_offsets": offsets}
        self._exchange.reduce(bucket, x, out, state["exchange"], comm)
        if self.rounding == "drop" and out is not x and positions is not None:
            x.index_fill_(0, positions.to(torch.int64), 0.0)

    def _select(self, bucket: Bucket, x: Tensor, offsets: Tensor, variance: Tensor, state: State) -> Tensor | None:
        """Positions to send, ascending, and the variance of the next step; None if x is not finite."""
        if bucket.squares is None:
            raise ValueError(
                f"{self!r} was given no squares: it tests each element against the variance of single samples, which "
                "only attach() gathers from a model. Set bucket.squares if you call reduce() yourself."
            )
        numbers = self.alpha, self.zeta, self.tau or 0.0
        test = kernels.on(x).unambiguous
        room = reserve(state, "positions", x.numel() // 16, torch.int32, x.device)
        count = test(x, state["variance"], bucket.squares, *numbers, variance, room)
        if count > room.numel():  # more than ever before
            room = reserve(state, "positions", count, torch.int32, x.device)
            test(x, state["variance"], bucket.squares, *numbers, variance, room)
        if count < 0:
            return None
        positions = room[:count]
        if self.values is None and self.tau is None:
            positions = self._without_dust(bucket.squares, x, positions, offsets, variance, state)
        return positions

    def _without_dust(
        self, squares: Tensor, x: Tensor, positions: Tensor, offsets: Tensor, variance: Tensor, state: State
    ) -> Tensor:
        """Leaves out what 4 bits cannot show beside the largest of its tensor: it counts as not sent."""
        picked = scratch(state, "picked", positions.numel(), torch.float32, x.device)
        kernels.on(x).gather(x, positions, picked)
        hidden = faint(picked, group_lengths(positions, offsets))
        if not hidden.numel():
            return positions
        dust = positions[hidden].to(torch.int64)
        variance[dust] = (state["variance"][dust] + squares[dust]).clamp_max(LARGEST) * self.zeta
        shown = torch.ones(positions.numel(), dtype=torch.bool, device=x.device).index_fill_(0, hidden, False)
        return positions[shown]

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """What is sent has no variance left."""
        later(state, variance=spare(state, "variance").zero_())


@dataclass(frozen=True, repr=False)
class _Picked(Sparse):
    """Sends the positions that VGC found, with one group of values a tensor."""

    values: Compressor

    def select(self, x: Tensor, state: State) -> Tensor | None:
        """Found before."""
        positions: Tensor | None = state["_positions"]
        if positions is not None:
            state["values"]["_groups"] = group_lengths(positions, state["_offsets"])
        return positions


@dataclass(frozen=True, repr=False)
class _Words(Compressor):
    """The same, in the paper's words."""

    values: Coded

    def encode(self, x: Tensor, state: State) -> Payload:
        """One word an element."""
        positions: Tensor | None = state["_positions"]
        if positions is None:
            return Payload.nonfinite(x.numel(), state, x.device)
        state["_sent"], state["_of"] = positions.numel(), x.numel()
        picked = scratch(state, "picked", positions.numel(), torch.float32, x.device)
        kernels.on(x).gather(x, positions, picked)
        return words.pack(self.values, picked, positions, state["_offsets"], x.numel(), state)

    def add_decoded(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """O(number sent)."""
        words.unpack(self.values, payload, acc, scale)
