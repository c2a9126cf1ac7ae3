"""Reducer: how N workers turn N buckets into one mean; and reducers around others."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import ClassVar

from torch import Tensor

from tersegrad.core.comm import Comm
from tersegrad.core.compressor import Sum, Vector, added
from tersegrad.core.layout import Layout, Step
from tersegrad.core.spec import Spec, require
from tersegrad.core.state import State, back_buffer, stage

# The second part of a reduction: waits, and returns whether ``out`` is finite, None if nobody looked.
Finish = Callable[[], bool | None]


@dataclass(frozen=True)
class Needs:
    """What a reducer needs from its host. Those of all reducers in a spec are merged with ``|``.

    Args:
        squares: ``step.squares`` over single "samples" ("sampled": some of them) or over "microbatch"es.
        lr: ``step.lr``.
        no_momentum: The optimizer must have no momentum of its own.
        lookahead: Gradients are taken at w - lookahead * lr * residual.
        float32: Buckets in other dtypes are handed over as float32 copies.
    """

    squares: str | None = None
    lr: bool = False
    no_momentum: bool = False
    lookahead: float = 0.0
    float32: bool = True

    def __or__(self, other: "Needs") -> "Needs":
        both = {self.squares, other.squares} - {None}
        if len(both) > 1:
            raise ValueError(f"squares over {' and over '.join(sorted(map(str, both)))} are needed. Choose one.")
        return Needs(
            self.squares or other.squares,
            self.lr or other.lr,
            self.no_momentum or other.no_momentum,
            max(self.lookahead, other.lookahead),
            self.float32 or other.float32,
        )


class Reducer(Spec, ABC):
    """How N workers turn N buckets into one mean; see ``tersegrad.core`` for the law."""

    contract: ClassVar[frozenset[str]] = Spec.contract | {
        "needs",
        "loses",
        "init",
        "start",
        "residual",
        "clear",
        "active",
    }

    def needs(self) -> Needs:
        """What it needs from its host; what the reducers inside it need is not counted in."""
        return Needs()

    def loses(self, workers: int) -> float:
        """How much it may throw away in a step: a share of the largest magnitude, at most 0.5; 0 for rounding only."""
        return 0.0

    @abstractmethod
    def init(self, layout: Layout, comm: Comm) -> State:
        """A fresh state for this bucket."""

    @abstractmethod
    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Sends; the function that it returns waits for the others, writes the mean into ``out``, and sends nothing.

        When that function returns, ``x`` holds what was not sent. Other buckets may be started in between, so that they
        are encoded while these bytes travel. ``out`` may be ``x`` (then nothing is left), or the ``b`` of a ``Sum``.
        """

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """What this worker remembers and has not sent, until the next step; None if it has no such memory."""
        return None

    def clear(self, layout: Layout, state: State) -> None:
        """Stages that the residual was sent: it is zero from the next step on."""

    def active(self, state: State | None, number: int) -> "Reducer":
        """The reducer that this one is the same as from step ``number`` on: a warm-up that is over is its ``inner``.

        ``state=None``: as if every step so far had been committed.
        """
        return self


def nothing_left() -> None:
    """The second part of a reduction that was done in one."""


def reduce(reducer: Reducer, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> bool | None:
    """Both parts of a reduction: writes the mean into ``out`` and leaves in ``x`` what was not sent."""
    return reducer.start(step, x, out, state, comm)()


def needs_of(spec: Spec) -> Needs:
    """What all reducers in a spec need."""
    own = [part.needs() for part in spec.walk() if isinstance(part, Reducer)]
    merged = own[0]
    for needs in own[1:]:
        merged |= replace(needs, float32=merged.float32)  # the outermost decides what it hands on
    return merged


def settled(reducer: Reducer) -> Reducer:
    """The reducer that a spec has become once its beginning is over: warm-ups and schedules by steps have ended.

    >>> from tersegrad import parse
    >>> settled(parse("Warmup(ErrorFeedback(Schedule(AllGather(TopK(0.1)), 'ratio', steps={0: 0.5, 9: 0.01})))"))
    ErrorFeedback(AllGather(TopK(ratio=0.01)))
    """
    return reducer.active(None, sys.maxsize)


class Composite(Reducer):
    """A reducer made of reducers: it starts what they start, so it waits for nothing in ``start`` if they do not."""


class Wrapper(Composite):
    """A reducer around another, its field ``inner``. It does what ``inner`` does but for what it overrides."""

    inner: Reducer

    def __post_init__(self) -> None:
        require(self, "inner", Reducer, f"Write {type(self).__name__}(AllGather({self.inner!r})).")

    def loses(self, workers: int) -> float:
        """As ``inner``."""
        return self.inner.loses(workers)

    def init(self, layout: Layout, comm: Comm) -> State:
        """The state of ``inner``, under that name."""
        return {"inner": self.inner.init(layout, comm)}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """As ``inner``; a ``Sum`` is passed on."""
        return self.inner.start(step, x, out, state["inner"], comm)

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """As ``inner``."""
        return self.inner.residual(layout, state["inner"])

    def clear(self, layout: Layout, state: State) -> None:
        """As ``inner``."""
        self.inner.clear(layout, state["inner"])

    def active(self, state: State | None, number: int) -> Reducer:
        """This wrapper around what ``inner`` has become."""
        inner = self.inner.active(state and state["inner"], number)
        return self if inner is self.inner else replace(self, inner=inner)  # type: ignore[type-var]


class Memory(Wrapper):
    """A wrapper that remembers what ``inner`` did not send, and adds it to the next gradient.

    There is one in a spec: a gradient that is remembered twice is applied twice.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_memory(self, self.inner)

    def init(self, layout: Layout, comm: Comm) -> State:
        """No residual yet."""
        return {"residual": layout.zeros(), "inner": self.inner.init(layout, comm)}

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """All that was not sent so far."""
        residual: Tensor = state["residual"]
        return residual

    def clear(self, layout: Layout, state: State) -> None:
        """Stages a residual of zeros."""
        stage(state, residual=back_buffer(state, "residual").zero_())
        self.inner.clear(layout, state["inner"])

    @staticmethod
    def _total(step: Step, x: Vector, state: State) -> Sum:
        """residual + x, where the next residual shall be: a step that is rolled back needs the present one again.

        Of idle tensors it is zero, so that nothing of them is sent; ``_hold`` puts their residual back.
        """
        total = Sum(state["residual"], added(x), back_buffer(state, "residual"))
        for idle in step.idle_slices():
            total.b[idle] = -total.a[idle]
        return total

    @staticmethod
    def _hold(step: Step, total: Sum) -> None:
        """After ``inner`` has sent: what was not offered to it is remembered on."""
        for idle in step.idle_slices():
            total.total[idle] += total.a[idle]


def remembers(spec: Spec) -> bool:
    """Whether anything in a spec has a residual."""
    return any(isinstance(part, Memory) for part in spec.walk())


def refuse_memory(outer: Reducer, inner: Reducer) -> None:
    """Refuses a residual inside the residual of ``outer``."""
    for spec in inner.walk():
        if isinstance(spec, Memory):
            raise ValueError(
                f"{type(outer).__name__}({inner!r}): {type(spec).__name__} inside has a memory of its own, and a "
                f"gradient remembered twice is applied twice. Write {inner!r} alone, or put inside only what sends, "
                "e.g. AllGather(TopK(0.01))."
            )


# ---- what classes may register about themselves --------------------------------------------------


@singledispatch
def contribution(reducer: Reducer, layout: Layout, state: State, x: Tensor, workers: int) -> Tensor:
    """What a gradient ``x`` adds to the account of what is sent and remembered: itself, but for methods with momentum.

    The law holds with this in the place of ``x``. It is asked before the step, and changes nothing.
    """
    return x


@contribution.register
def _contribution_to_inner(reducer: Wrapper, layout: Layout, state: State, x: Tensor, workers: int) -> Tensor:
    return contribution(reducer.inner, layout, state["inner"], x, workers)


@singledispatch
def phases(reducer: Reducer) -> list[Reducer]:
    """Reducers that, run for a few steps each, enter every phase that this one can enter; attach compiles them."""
    return [reducer]


@phases.register
def _phases_of_inner(reducer: Wrapper) -> list[Reducer]:
    return [replace(reducer, inner=inner) for inner in phases(reducer.inner)]  # type: ignore[type-var]


@singledispatch
def why_uncompressed(reducer: Reducer, shapes: list[tuple[int, ...]]) -> str | None:
    """Why it will send all tensors of these shapes uncompressed, and what to write instead; None if it will not."""
    return None


@why_uncompressed.register
def _why_inner(reducer: Wrapper, shapes: list[tuple[int, ...]]) -> str | None:
    return why_uncompressed(reducer.inner, shapes)
