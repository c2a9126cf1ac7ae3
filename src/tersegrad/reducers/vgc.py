"""VGC: an element is sent when it is unambiguous: when its square exceeds alpha times its estimated variance.

Tsuzuku, Imachi and Akiba, "Variance-based gradient compression for efficient distributed deep learning", ICLR 2018
workshop track.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._fixed_width import group_lengths
from tersegrad.compressors._multiples import Multiples, multiples
from tersegrad.compressors._pow2 import Pow2, faint
from tersegrad.compressors._signs import Signs, require_threshold
from tersegrad.core import (
    Comm,
    Compressor,
    Finish,
    Layout,
    Needs,
    Reducer,
    State,
    Step,
    Vector,
    added,
    back_buffer,
    param,
    require,
    reserve,
    scratch,
    stage,
)
from tersegrad.kernels.ops import FLOAT32_MAX
from tersegrad.reducers._vgc_frames import Picked, Words
from tersegrad.reducers.allgather import AllGather

SQUARES = ("samples", "sampled", "microbatch")
ROUNDINGS = ("feedback", "drop")
LAYOUTS = ("packed", "words")
RULES = ("ours", "paper")
CORRECTIONS = ("before", "after")


class _Selected(NamedTuple):
    """Positions, ascending: of the elements that pass the test, and of those among them that are sent."""

    passed: Tensor
    sent: Tensor
    largest: Tensor | None = None  # magnitude of each tensor, where values are coded relative to it


@dataclass(frozen=True, repr=False)
class VGC(Reducer):
    """Sends x_i when x_i^2 > alpha * v_i, where v_i sums the squares of what each sample adds to x_i.

    v += squares of this step;  sent: v = 0;  not sent: v *= zeta

    ``x`` must include the residual, so write ``ErrorFeedback(VGC())``: its residual is the paper's r. With ``tau`` an
    element must also exceed tau, and S = floor(|x| / tau) tau is sent with its sign (the hybrid with Strom's method);
    then v = max(v - 2 |x| S + S^2, 0), with x before S is subtracted.

    Values are sent as signed powers of two in 4 bits, relative to the largest one of their tensor in this step. Those
    more than 7 binades below it underflow: they are not sent, and stay in the residual. The squares of single samples
    come from ``step.squares``, which ``attach`` gathers (``per_sample/``).

    ``rule="paper"`` does as printed: powers are relative to the largest element of the whole tensor, all that passes
    the test leaves x (rounding errors and what underflows too), the hybrid sends +-tau once, and every element sent is
    one 32-bit word.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "VGC(alpha=1.0)",
        "ErrorFeedback(VGC(alpha=3.0))",
        "ErrorFeedback(VGC(alpha=3.0, rounding='drop'))",
        "ErrorFeedback(VGC(alpha=3.0, tau=0.05, squares='microbatch'))",
        "ErrorFeedback(VGC(alpha=3.0, layout='words'))",
        "ErrorFeedback(VGC(alpha=3.0, values=BF16()))",
        "ErrorFeedback(VGC(alpha=3.0, rule='paper'))",
        "ErrorFeedback(VGC(alpha=3.0, tau=0.05, rule='paper', correction='after'))",
    )

    alpha: float = param(1.5, "higher => fewer elements, sent later; 0: every element")
    zeta: float = param(0.999, "decay of the variance of elements that are not sent; lower => sent sooner")
    tau: float | None = param(None, "None: the value itself is sent; a number: multiples of tau, where |x| > tau")
    rounding: str = param("feedback", 'the rounding error of a value stays in x ("feedback") or is discarded ("drop")')
    squares: str = param(
        "samples",
        'variance over "samples"; "sampled": over a quarter of them, cheaper; "microbatch": over whole backward passes',
    )
    values: Compressor | None = param(None, "None: 4-bit powers of two; else the codec of the values")
    layout: str = param("packed", '"packed"; "words": one 32-bit word per element, as in the paper, to compare ratios')
    rule: str = param("ours", '"paper": as printed: words, the largest of the whole tensor, all that passes leaves x')
    correction: str = param("before", 'with tau, v is corrected with x "before" or "after" what is sent is subtracted')

    def __post_init__(self) -> None:
        for name, low, high in (("alpha", 0.0, math.inf), ("zeta", 0.0, 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= min(high, 1e30):
                raise ValueError(f"VGC({name}={value!r}): {name} is a number from {low:g} to {high:g}.")
        for name, choices in (
            ("rounding", ROUNDINGS),
            ("squares", SQUARES),
            ("layout", LAYOUTS),
            ("rule", RULES),
            ("correction", CORRECTIONS),
        ):
            if getattr(self, name) not in choices:
                allowed = " or ".join(map(repr, choices))
                raise ValueError(f"VGC({name}={getattr(self, name)!r}): write {allowed}.")
        if self.values is not None:
            require(self, "values", Compressor, "Write e.g. values=BF16(), or leave it out for 4 bits.")
            if self.tau is not None or self._in_words:
                raise ValueError(
                    f"VGC(values={self.values!r}): with tau only multiples of it are sent, and words hold 4 bits. "
                    "Leave values out, or leave tau, layout and rule out."
                )
        if self.tau is not None:
            self._require_hybrid(self.tau)
        elif self.correction != "before":
            raise ValueError("VGC(correction='after') is a matter of the hybrid. Give tau, or leave it out.")

    def _require_hybrid(self, tau: float) -> None:
        require_threshold(self, tau)
        if self.rounding == "drop":
            raise ValueError("VGC(tau=..., rounding='drop'): with tau nothing is rounded. Leave rounding out.")
        if self.layout == "words" and self.rule != "paper":
            raise ValueError(
                "VGC(tau=..., layout='words'): a word has no room for a multiple of tau. Leave layout out, or write "
                "rule='paper', which sends tau once."
            )

    def needs(self) -> Needs:
        """The sums of squared gradients, over samples or backward passes."""
        return Needs(squares=self.squares)

    def loses(self, workers: int) -> float:
        """The rounding error, if it is dropped: rounding to a power of two is off by at most half."""
        return 0.5 if self._drops else 0.0

    @property
    def _in_words(self) -> bool:
        return self.layout == "words" or self.rule == "paper"

    @property
    def _drops(self) -> bool:
        """Whether all that passes the test leaves x, sent or not."""
        return self.tau is None and (self.rounding == "drop" or self.rule == "paper")

    @cached_property
    def _exchange(self) -> Reducer:
        if self._in_words:
            return AllGather(Words(Pow2() if self.tau is None else Signs(self.tau)))
        return AllGather(Picked(self.values or (Pow2() if self.tau is None else Multiples(self.tau))))

    def init(self, layout: Layout, comm: Comm) -> State:
        return {"variance": layout.zeros(), "exchange": self._exchange.init(layout, comm)}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Test every element and send those that pass; the others stay in ``x``."""
        x = added(x)
        offsets = torch.tensor(step.layout.offsets, device=x.device)
        variance = back_buffer(state, "variance")
        selected = self._select(step, x, offsets, variance, state)
        stage(state, variance=variance)
        sent, largest = (None, None) if selected is None else (selected.sent, selected.largest)
        state["exchange"] |= {"_positions": sent, "_offsets": offsets, "_largest": largest}
        finish = self._exchange.start(step, x, out, state["exchange"], comm)
        if self._drops and out is not x and selected is not None:
            x.index_fill_(0, selected.passed.to(torch.int64), 0.0)
        return finish

    def _select(self, step: Step, x: Tensor, offsets: Tensor, variance: Tensor, state: State) -> _Selected | None:
        """What passes, what is sent, and the variance of the next step; None if x is non-finite."""
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
        passed = found[:count]
        if self.tau is not None:
            self._correct(self.tau, x, passed, step.squares, variance, state)
        elif self.values is None:
            return self._without_faint(step, x, passed, offsets, variance, state)
        return _Selected(passed, passed)

    def _correct(self, tau: float, x: Tensor, passed: Tensor, squares: Tensor, variance: Tensor, state: State) -> None:
        """The variance of elements of which a part is sent; the test has written it for one tau, ``before``."""
        if self.rule == "paper" and self.correction == "before":
            return
        at = passed.to(torch.int64)
        v, r = self._grown(at, squares, state), x[at].abs()
        sent = torch.full_like(r, tau) if self.rule == "paper" else multiples(r, tau).mul_(tau)
        if self.correction == "after":
            r -= sent
        variance[at] = ((v - (r * sent) * 2) + sent.square()).clamp_min_(0.0)

    def _without_faint(
        self, step: Step, x: Tensor, passed: Tensor, offsets: Tensor, variance: Tensor, state: State
    ) -> _Selected:
        """Leave out values that underflow relative to the largest: they wait like those that do not pass.

        With ``rule="paper"`` they are not sent and leave x all the same.
        """
        assert step.squares is not None
        printed = self.rule == "paper"
        picked = scratch(state, "picked", passed.numel(), torch.float32, x.device)
        kernels.on(x).gather(x, passed, picked)
        largest = _largest(x, step.layout) if printed else None
        hidden = faint(picked, group_lengths(passed, offsets), largest)
        if not hidden.numel():
            return _Selected(passed, passed, largest)
        hidden_at = passed[hidden].to(torch.int64)
        if not printed:
            variance[hidden_at] = self._grown(hidden_at, step.squares, state) * self.zeta
        shown = torch.ones(passed.numel(), dtype=torch.bool, device=x.device).index_fill_(0, hidden, False)
        sent = passed[shown]
        return _Selected(passed if printed else sent, sent, largest)

    @staticmethod
    def _grown(at: Tensor, squares: Tensor, state: State) -> Tensor:
        """The variance with this step's squares, at some positions."""
        variance: Tensor = state["variance"]
        return (variance[at] + squares[at]).clamp_max_(FLOAT32_MAX)

    def clear(self, layout: Layout, state: State) -> None:
        """Stage a variance of zero, as for elements that were sent."""
        stage(state, variance=back_buffer(state, "variance").zero_())


def _largest(x: Tensor, layout: Layout) -> Tensor:
    """The largest magnitude of each tensor; 0 of an empty one."""
    filled = [i for i, size in enumerate(layout.sizes) if size]
    parts = x.split(layout.sizes)
    result: Tensor = x.new_zeros(len(parts))
    if filled:
        result[filled] = torch.stack(torch._foreach_norm([parts[i] for i in filled], math.inf))
    return result
