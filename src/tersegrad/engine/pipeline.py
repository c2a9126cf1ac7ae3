"""One training step over many buckets: each is started as it comes, and finished when the next one is started.

Used by one thread at a time: the worker's.
"""

from collections.abc import Callable

from torch import Tensor

from tersegrad import kernels
from tersegrad.comm.metered import Metered, Span
from tersegrad.core import Finish, Reducer, Step
from tersegrad.core import state as states
from tersegrad.engine.buckets import BucketStore, Entry
from tersegrad.engine.gradient import Gradient
from tersegrad.engine.idle import idle_tensors

SeenIdle = Callable[[frozenset[str]], None]


class Pipeline:
    """Starts, finishes, commits and rolls back."""

    def __init__(
        self, spec: Reducer, store: BucketStore, comm: Metered, looks_at_means: bool, seen_idle: SeenIdle | None
    ):
        self._spec = spec
        self._store = store
        self._comm = comm
        self._looks_at_means = looks_at_means  # also where no state could be spoilt
        self._seen_idle = seen_idle  # is told of tensors without a gradient; None if there are none
        self._under_way: Callable[[], None] | None = None  # finishes the bucket whose bytes are on their way
        self._nonfinite: list[str] = []  # tensors of this step whose mean is not finite

    def start(self, gradient: Gradient) -> None:
        """Sends this bucket; only then the one before is waited for."""
        before, self._under_way = self._under_way, None  # if something fails here, nobody holds on to its messages
        entry = self._store.entry(gradient.names, gradient.buffer)
        step = Step(entry.layout, gradient.step, gradient.lr, gradient.squares, self._idle_in(gradient, entry))
        self._comm.begin(entry.layout.id)
        mean = gradient.buffer if entry.float32 is None else entry.float32.copy_(gradient.buffer)
        if gradient.scale != 1.0:
            mean.div_(gradient.scale)
        finish = self._spec.start(step, mean, mean, entry.state, self._comm)
        span = self._comm.pause()
        if before is not None:
            before()
        self._under_way = lambda: self._finish_one(gradient, entry, mean, finish, span)

    def _idle_in(self, gradient: Gradient, entry: Entry) -> frozenset[str] | None:
        if self._seen_idle is None or not entry.state:
            return None
        idle = idle_tensors(gradient.buffer, entry.layout)
        self._seen_idle(idle)
        return idle

    def finish(self) -> None:
        """Waits for what was started last."""
        finish, self._under_way = self._under_way, None
        if finish is not None:
            finish()

    def _finish_one(self, gradient: Gradient, entry: Entry, mean: Tensor, finish: Finish, span: Span) -> None:
        """The mean over all workers takes the place of the gradient."""
        self._comm.resume(span)
        finite = finish()
        if gradient.squares is not None:
            gradient.squares.zero_()
        if not finite:
            self._nonfinite += self._nonfinite_in(mean, entry)
        if gradient.scale != 1.0:
            mean.mul_(gradient.scale)
        if entry.float32 is not None:
            gradient.buffer.copy_(entry.float32)
        self._comm.end()

    def _nonfinite_in(self, mean: Tensor, entry: Entry) -> list[str]:
        """The tensors whose mean is not finite; looked at only if it matters to somebody."""
        matters = entry.state or self._looks_at_means
        if not matters or all(kernels.read(kernels.on(mean).all_finite(mean))):
            return []
        parts = zip(entry.layout.names, mean.split(entry.layout.sizes), strict=True)
        return [name for name, part in parts if not bool(part.isfinite().all())]

    def commit(self, idle: frozenset[str] = frozenset()) -> list[str]:
        """Ends the step: it is committed, or rolled back in all buckets if any of its means is not finite.

        All workers hold the same means, so they decide alike.

        Args:
            idle: Tensors that no worker had a gradient of: what is remembered of them is what it was before.

        Returns:
            The tensors whose mean is not finite.
        """
        nonfinite, self._nonfinite = self._nonfinite, []
        for entry in self._store.entries():
            if idle and not idle.isdisjoint(entry.layout.names):
                states.hold(entry.state, entry.layout, idle)
            (states.roll_back if nonfinite else states.commit)(entry.state)
        return nonfinite
