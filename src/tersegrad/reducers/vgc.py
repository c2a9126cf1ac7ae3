"""VGC: an element is sent when it is unambiguous: when its square exceeds alpha times its estimated variance.

Tsuzuku, Imachi and Akiba, "Variance-based gradient compression for efficient distributed deep learning", ICLR 2018
workshop track.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors import _word32
from tersegrad.compressors._fixed_width import FixedWidth, group_lengths
from tersegrad.compressors._pow2 import Pow2, faint
from tersegrad.compressors._signs import Signs, require_threshold
from tersegrad.compressors._sparse import Selection, Sparse
from tersegrad.core import (
    Comm,
    Compressor,
    Finish,
    Layout,
    Needs,
    Paused,
    Payload,
    Reducer,
    State,
    Step,
    Vector,
    added,
    back_buffer,
    param,
    report,
    require,
    reserve,
    scratch,
    stage,
)
from tersegrad.core.pausing import done
from tersegrad.kernels.ops import FLOAT32_MAX
from tersegrad.reducers.allgather import AllGather

SQUARES = ("samples", "microbatch")
ROUNDINGS = ("feedback", "drop")
LAYOUTS = ("packed", "words")


@dataclass(frozen=True, repr=False)
class VGC(Reducer):
    """Sends x_i when x_i^2 > alpha * v_i, where v_i sums the squares of what each sample adds to x_i.

    v += squares of this step;  sent: v = 0;  not sent: v *= zeta

    ``x`` must include the residual, so write ``ErrorFeedback(VGC())``: its residual is the paper's r. With ``tau`` an
    element must also exceed tau, and +-tau is sent (the hybrid with Strom's method); then
    v = max(v - 2 |x| tau + tau^2, 0), with x before tau is subtracted.

    Values are sent as signed powers of two in 4 bits, relative to the largest one of their tensor in this step. Those
    more than 7 binades below it underflow: they are not sent, and stay in the residual. The squares of single samples
    come from ``step.squares``, which ``attach`` gathers (``per_sample/``).
    """

    examples: ClassVar[tuple[str, ...]] = (
        "VGC(alpha=1.0)",
        "ErrorFeedback(VGC(alpha=3.0))",
        "ErrorFeedback(VGC(alpha=3.0, rounding='drop'))",
        "ErrorFeedback(VGC(alpha=3.0, tau=0.05, squares='microbatch'))",
        "ErrorFeedback(VGC(alpha=3.0, layout='words'))",
        "ErrorFeedback(VGC(alpha=3.0, values=BF16()))",
    )

    alpha: float = param(1.5, "higher => fewer elements, sent later; 0: every element")
    zeta: float = param(0.999, "decay of the variance of elements that are not sent; lower => sent sooner")
    tau: float | None = param(None, "None: the value itself is sent; a number: +-tau is sent where |x| > tau")
    rounding: str = param("feedback", 'the rounding error of a value stays in x ("feedback") or is discarded ("drop")')
    squares: str = param("samples", 'variance over "samples", or over whole backward passes ("microbatch")')
    values: Compressor | None = param(None, "None: 4-bit powers of two; else the codec of the values")
    layout: str = param("packed", '"packed"; "words": one 32-bit word per element, as in the paper, to compare ratios')

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

    def needs(self) -> Needs:
        """The sums of squared gradients, over samples or backward passes."""
        return Needs(squares=self.squares)

    def loses(self, workers: int) -> float:
        """The rounding error, if it is dropped: rounding to a power of two is off by at most half."""
        return 0.5 if self.rounding == "drop" else 0.0

    @cached_property
    def _exchange(self) -> Reducer:
        coded: FixedWidth = Pow2() if self.tau is None else Signs(self.tau)
        return AllGather(_Words(coded) if self.layout == "words" else _Picked(self.values or coded))

    def init(self, layout: Layout, comm: Comm) -> State:
        return {"variance": layout.zeros(), "exchange": self._exchange.init(layout, comm)}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Test every element and send those that pass; the others stay in ``x``."""
        x = added(x)
        offsets = torch.tensor(step.layout.offsets, device=x.device)
        variance = back_buffer(state, "variance")
        positions = self._select(step, x, offsets, variance, state)
        stage(state, variance=variance)
        state["exchange"] |= {"_positions": positions, "_offsets": offsets}
        finish = self._exchange.start(step, x, out, state["exchange"], comm)
        if self.rounding == "drop" and out is not x and positions is not None:
            x.index_fill_(0, positions.to(torch.int64), 0.0)
        return finish

    def _select(self, step: Step, x: Tensor, offsets: Tensor, variance: Tensor, state: State) -> Tensor | None:
        """Positions to send, ascending, and the variance of the next step; None if x is non-finite."""
        if step.squares is None:
            raise ValueError(
                f"{self!r} was given no squares: it tests each element against the variance of single samples, which "
                "only attach() gathers from a model. Give Step(..., squares=...) if you call it yourself."
            )
        numbers = self.alpha, self.zeta, self.tau or 0.0
        test = kernels.on(x).unambiguous
        found = reserve(state, "positions", x.numel() // 16, torch.int32, x.device)
        count = int(kernels.read(test(x, state["variance"], step.squares, *numbers, variance, found))[0])
        if count > found.numel():  # more than the buffer holds
            found = reserve(state, "positions", count, torch.int32, x.device)
            test(x, state["variance"], step.squares, *numbers, variance, found)
        if count < 0:
            return None
        positions = found[:count]
        if self.values is None and self.tau is None:
            positions = self._without_faint(step.squares, x, positions, offsets, variance, state)
        return positions

    def _without_faint(
        self, squares: Tensor, x: Tensor, positions: Tensor, offsets: Tensor, variance: Tensor, state: State
    ) -> Tensor:
        """Leave out values that underflow relative to the largest of their tensor: they count as not sent."""
        picked = scratch(state, "picked", positions.numel(), torch.float32, x.device)
        kernels.on(x).gather(x, positions, picked)
        hidden = faint(picked, group_lengths(positions, offsets))
        if not hidden.numel():
            return positions
        hidden_at = positions[hidden].to(torch.int64)
        variance[hidden_at] = (state["variance"][hidden_at] + squares[hidden_at]).clamp_max(FLOAT32_MAX) * self.zeta
        shown = torch.ones(positions.numel(), dtype=torch.bool, device=x.device).index_fill_(0, hidden, False)
        return positions[shown]

    def clear(self, layout: Layout, state: State) -> None:
        """Stage a variance of zero, as for elements that were sent."""
        stage(state, variance=back_buffer(state, "variance").zero_())


@dataclass(frozen=True, repr=False)
class _Picked(Sparse):
    """Sends the positions that VGC selected, with one group of values per tensor."""

    values: Compressor

    def selecting(self, x: Tensor, state: State) -> Paused[Selection | None]:
        """The positions were selected before, by VGC itself."""
        positions: Tensor | None = state["_positions"]
        if positions is None:
            return done(None)
        state["values"]["_groups"] = group_lengths(positions, state["_offsets"])
        return done(Selection(positions))


@dataclass(frozen=True, repr=False)
class _Words(Compressor):
    """``_Picked`` in the paper's layout: one 32-bit word per element."""

    values: FixedWidth

    def encode(self, x: Tensor, state: State) -> Payload:
        positions: Tensor | None = state["_positions"]
        if positions is None:
            return Payload.nonfinite(x.numel(), state, x.device)
        report(state, sent=positions.numel(), of=x.numel())
        picked = scratch(state, "picked", positions.numel(), torch.float32, x.device)
        kernels.on(x).gather(x, positions, picked)
        return _word32.pack(self.values, picked, positions, state["_offsets"], x.numel(), state)

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        _word32.unpack(self.values, payload, acc, scale)
