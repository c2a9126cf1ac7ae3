"""Warmup: the first steps of training go another way, usually dense."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from tersegrad.core import Bucket, Comm, Finish, Reducer, State, later, require
from tersegrad.reducers.dense import Dense


@dataclass(frozen=True, repr=False)
class Warmup(Reducer):
    """The first ``steps`` steps by ``first``, all others by ``inner``; early gradients change fast and stale ones hurt.

    Steps that are undone (NaN) do not count. For a ratio that shrinks step by step see Schedule.
    """

    examples: ClassVar[tuple[str, ...]] = ("Warmup(ErrorFeedback(AllGather(TopK(0.1))), steps=2)",)

    inner: Reducer  # for the rest of training
    steps: int = 100  # higher => safer, more bytes
    first: Reducer = field(default_factory=Dense)  # for the beginning

    def __post_init__(self) -> None:
        require(self, "inner", Reducer, "Write e.g. Warmup(ErrorFeedback(AllGather(TopK(0.01))), steps=100).")
        require(self, "first", Reducer, "Write e.g. first=AllReduce(BF16()).")
        if type(self.steps) is not int or self.steps < 0:
            raise ValueError(f"Warmup(steps={self.steps!r}): a whole number of steps, 0 or more.")
        for spec in self.first.walk():
            if isinstance(spec, Reducer) and spec.remembers:
                raise ValueError(
                    f"Warmup(first={self.first!r}): what {type(spec).__name__} still remembers when the warm-up ends "
                    "would be lost. Write one without a memory, e.g. first=AllReduce(BF16())."
                )

    @property
    def conserves(self) -> bool:
        """If both do."""
        return self.inner.conserves and self.first.conserves

    def settled(self) -> Reducer:
        """``inner``."""
        return self.inner.settled()

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Both, and where training is."""
        return {"position": 0, "first": self.first.init(bucket, comm), "inner": self.inner.init(bucket, comm)}

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """By the one whose time it is."""
        self.start(bucket, x, out, state, comm)()

    def start(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> Finish:
        """As far as that one gets without the others."""
        now, memory = self._now(state)
        return now.start(bucket, x, out, memory, comm)

    def start_sum(
        self, bucket: Bucket, a: Tensor, b: Tensor, total: Tensor, out: Tensor, state: State, comm: Comm
    ) -> Finish:
        """Likewise."""
        now, memory = self._now(state)
        return now.start_sum(bucket, a, b, total, out, memory, comm)

    def _now(self, state: State) -> tuple[Reducer, State]:
        """The one whose time it is, and its state."""
        position = state["position"]
        if position < self.steps:
            later(state, position=position + 1)
            return self.first, state["first"]
        return self.inner, state["inner"]

    def waiting(self, bucket: Bucket, state: State) -> Tensor | None:
        """``inner``'s; in the beginning it has none."""
        return self.inner.waiting(bucket, state["inner"]) if state["position"] >= self.steps else None

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """``inner``'s; ``first`` remembers nothing."""
        self.inner.flush(bucket, out, state["inner"])
