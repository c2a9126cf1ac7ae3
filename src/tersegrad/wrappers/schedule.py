"""Schedule: change one number of a spec during training, by the step or by the learning rate."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from tersegrad.core import (
    Comm,
    Finish,
    Layout,
    Needs,
    Reducer,
    Spec,
    State,
    Step,
    Vector,
    Wrapper,
    param,
    phases,
    stage,
)

LAWS = ("steps", "drops", "smoothness")


@dataclass(frozen=True, repr=False)
class Schedule(Wrapper):
    """Runs ``inner`` with its ``field`` set at each step, by one of three laws: steps, drops or smoothness.

    steps: the value from a step on; {0: 0.9, 3000: 0.0} is 0.9, and 0 from step 3000 on.
    drops: the value once the learning rate is at most a share of the highest so far; {1.0: 0.9, 0.5: 0.0} is 0.9 until
    the learning rate has halved, and 0 then.
    smoothness: theta^2 = L * (learning rate), where theta is the share that is dropped, at most the value in ``inner``.
    A ``ratio`` is a share that is kept: it becomes 1 - theta, at least the value in ``inner``.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "Schedule(ErrorFeedback(AllGather(TopK(0.1))), 'ratio', steps={0: 0.1, 2: 0.2})",
        "ErrorFeedback(Schedule(AllGather(TopK(0.1)), 'ratio', drops={1.0: 0.1, 0.3: 1.0}))",
        "Schedule(AllGather(TopK(0.1)), 'ratio', smoothness=7.5)",
    )

    inner: Reducer = param(doc="the reducer that is run")
    field: str = param(doc='the name of a number in ``inner``: "theta", "ratio", "alpha", ...')
    steps: dict[int, float] | None = param(None, "first step -> value")
    drops: dict[float, float] | None = param(None, "share of the highest learning rate -> value from there down")
    smoothness: float | None = param(None, "the L of theta^2 = L * (learning rate); higher => drops more")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in LAWS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"Schedule: give one of {', '.join(LAWS)}; {' and '.join(given) or 'none'} was given.")
        if self.smoothness is not None and not 0 < self.smoothness < math.inf:
            raise ValueError(f"Schedule(smoothness={self.smoothness!r}): L is a positive number.")
        self._require_table("steps", first=0)
        self._require_table("drops", first=1.0)
        self._own_value()
        for value in (self.steps or self.drops or {}).values():
            self._inner_with(value)  # a value that inner rejects is an error now, not at step 3000

    def _require_table(self, name: str, first: float) -> None:
        table = getattr(self, name)
        if table is None:
            return
        numbers = isinstance(table, dict) and all(
            isinstance(n, int | float) and not isinstance(n, bool) for pair in table.items() for n in pair
        )
        if not numbers or first not in table or any(key < 0 for key in table):
            raise ValueError(
                f"Schedule({name}={table!r}): write a table that says what to begin with, e.g. "
                f"{name}={{{first}: 0.9, {'3000' if name == 'steps' else '0.5'}: 0.0}}."
            )

    def needs(self) -> Needs:
        """The learning rate, for two of the laws."""
        return Needs(lr=self.steps is None)

    def init(self, layout: Layout, comm: Comm) -> State:
        return {"position": 0, "highest_lr": 0.0, **super().init(layout, comm)}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """``inner`` with the value of this step."""
        highest = max(state["highest_lr"], step.lr or 0.0)
        stage(state, position=state["position"] + 1, highest_lr=highest)
        now = self._inner_with(self.value(state["position"], step.lr, highest))
        return now.start(step, x, out, state["inner"], comm)

    def active(self, state: State | None, number: int) -> Reducer:
        """``inner`` with the last value of ``steps`` once that is reached; the other laws never end."""
        position = number if state is None else state["position"]
        if self.steps is None or position < max(self.steps):
            return super().active(state, number)
        last = self._inner_with(self.steps[max(self.steps)])
        return last.active(state and state["inner"], number)

    def value(self, step: int, lr: float | None, highest: float) -> float:
        """The field's value at a step, with this learning rate and the highest one so far.

        >>> from tersegrad import parse
        >>> parse("Schedule(AllGather(TopK(0.1)), 'ratio', steps={0: 0.1, 500: 0.01})").value(700, None, 0.0)
        0.01
        """
        if self.steps is not None:
            return self.steps[max(begin for begin in self.steps if begin <= step)]
        if lr is None:
            raise ValueError(
                f"{self!r} depends on the learning rate, which is not known. "
                "Write attach(model, ..., optimizer=optimizer)."
            )
        if self.drops is not None:
            share = lr / highest if highest else 1.0
            return self.drops[min(limit for limit in self.drops if share <= limit)]
        assert self.smoothness is not None
        own, theta = self._own_value(), min(1.0, math.sqrt(self.smoothness * max(lr, 0.0)))
        return max(own, 1.0 - theta) if self.field == "ratio" else min(own, theta)

    def _own_value(self) -> float:
        """The field's value in ``inner``, which must have exactly one such field."""
        found = [getattr(spec, self.field) for spec in self.inner.walk() if self.field in _numbers(spec)]
        if len(found) != 1:
            known = sorted({name for spec in self.inner.walk() for name in _numbers(spec)})
            raise ValueError(
                f"Schedule(field={self.field!r}): {self.inner!r} has {len(found)} numbers of that name, and one is "
                f"needed. It has: {', '.join(known) or 'none at all'}."
            )
        return float(found[0])

    @cached_property
    def _variants(self) -> dict[float, Reducer]:
        return {}

    def _inner_with(self, value: float) -> Reducer:
        """``inner`` with another value; those of a table are cached."""
        if value in self._variants:
            return self._variants[value]
        changed = _with(self.inner, self.field, value)
        assert isinstance(changed, Reducer)
        if self.smoothness is None:
            self._variants[value] = changed
        return changed


@phases.register
def _phases(reducer: Schedule) -> list[Reducer]:
    """Every value of a table; without a table, both ends of the range."""
    table = reducer.steps or reducer.drops
    variants = [reducer._inner_with(value) for value in table.values()] if table else [reducer.inner]
    return [phase for variant in variants for phase in phases(variant)]


def _numbers(spec: Spec) -> list[str]:
    """The names of a spec's own numbers."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}  # type: ignore[arg-type]
    return [n for n, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)]


def _with(spec: Any, field: str, value: float) -> Any:
    """The same spec, with another value in every nested spec that has this field."""
    if isinstance(spec, dict):
        return {key: _with(child, field, value) for key, child in spec.items()}
    if not isinstance(spec, Spec):
        return spec
    changed = {f.name: _with(getattr(spec, f.name), field, value) for f in fields(spec)}  # type: ignore[arg-type]
    if field in _numbers(spec):
        changed[field] = value
    return replace(spec, **changed)  # type: ignore[type-var]
