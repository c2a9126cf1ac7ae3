"""Engine: one training step over many buckets, for any host.

A host hands over gradients (``submit``) and is called back when each holds the mean over workers. Three kinds of
threads meet here, and every method that is not for the host's thread alone says so:

- the host's: submits, and asks for metrics and state between two steps;
- the worker's: reduces buckets in one order on all ranks, commits or rolls back;
- gloo's: completes the buckets of uncompressed steps.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from tersegrad.comm.metered import Metered
from tersegrad.comm.torch import NetworkError
from tersegrad.comm.traffic import all_reduce_traffic
from tersegrad.core import Comm, Reducer, State, needs_of, version
from tersegrad.engine import at_exit, checkpoint, replicas
from tersegrad.engine.bookkeeping import Bookkeeping
from tersegrad.engine.buckets import BucketStore
from tersegrad.engine.failure_report import AloneError, Doing
from tersegrad.engine.gradient import Done, Gradient
from tersegrad.engine.options import Options
from tersegrad.engine.peers import Peers
from tersegrad.engine.pipeline import Pipeline
from tersegrad.engine.reassembly import Reassembly
from tersegrad.engine.roll_call import RollCall, follows_lr, has_frames
from tersegrad.engine.uncompressed import Uncompressed
from tersegrad.engine.warm import warm
from tersegrad.engine.worker import Worker
from tersegrad.reducers.dense import Dense

T = TypeVar("T")


class Engine:
    """Averages gradients by a spec with other workers.

    Args:
        spec: How.
        shapes: Of the tensors that have gradients, by name.
        options: What the host was told.
        peers: The other workers.
        replicas: The parameters as they are between two steps, for ``check_replicas``.
        required: The tensors that a saved state must have; None: all.
        finds_unused: Whether the host throws away the mean of tensors that no worker used.
        facts: What else must be the same on all workers, by name.
    """

    def __init__(
        self,
        spec: Reducer,
        shapes: dict[str, tuple[int, ...]],
        options: Options,
        peers: Peers,
        replicas: Callable[[], dict[str, Tensor]],
        required: frozenset[str] | None = None,
        finds_unused: bool = False,
        facts: dict[str, object] | None = None,
    ):
        self.spec = spec
        self._options = options
        self._numel = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
        self._replicas = replicas
        self._may_skip_worker = (
            options.network is None
            and options.scaler is None
            and options.nonfinite == "propagate"
            and needs_of(spec).squares is None
        )
        self._step = 0
        self._in_step = False  # some of its buckets have come, and not the last
        self._uncompressed_step = False
        self._arrived: list[Gradient] = []  # of this step; they are done together
        self._handed_over = self._taken = 0  # buckets, to the worker and by it
        self._nonfinite_steps = 0
        self._verdict: FloatingPointError | None = None  # on the step that has just ended
        self._dense_bytes = 0
        self._exchanged = 0  # the step that is being reduced
        self._required = frozenset(shapes) if required is None else required
        self._finds_unused = finds_unused
        self._run = ""  # says of two states that they are of one run
        self._roll_call: RollCall | None = None
        self._calls_first = False
        self._uncompressed: Uncompressed | None = None
        self._peers = peers
        self._worker = Worker(peers.explain, peers.turn)
        peers.watch(self._doing)
        at_exit.add(self)
        try:
            self._connect(shapes, facts or {})
            warm(spec, sum(self._numel.values()))
        except BaseException:
            self.close()
            raise

    def _connect(self, shapes: dict[str, tuple[int, ...]], facts: dict[str, object]) -> None:
        options = self._options
        try:
            unmetered = self._peers.connect()
        except NetworkError as error:
            raise self._peers.explain(error) from error
        self._comm = Metered(unmetered)
        self._store = BucketStore(self.spec, shapes, unmetered, options.seed, options.scaler is not None)
        self._reassembly = Reassembly(self._numel, self._required)
        self._roll_call = self._make_roll_call(unmetered)
        seen_idle = self._roll_call.see_idle if self._roll_call and self._finds_unused else None
        self._pipeline = Pipeline(self.spec, self._store, self._comm, options.nonfinite != "propagate", seen_idle)
        self._uncompressed = Uncompressed(self._comm, self._roll_call, self._fail)
        self._books = Bookkeeping(self.spec, self._store, self._reassembly, self._comm, self._numel, self._required)
        mine = self._facts() | facts
        self._run = self._worker.call(lambda: self._peers.agree(mine), together=True)

    def _facts(self) -> dict[str, object]:
        """What all workers must have been told alike."""
        facts: dict[str, object] = {
            "tersegrad": version.__version__,
            "spec": self.spec,
            "parameters": sum(self._numel.values()),
            **self._options.facts(),
        }
        return facts | ({"learning rate": self._options.lr()} if follows_lr(self.spec) else {})

    def _make_roll_call(self, comm: Comm) -> RollCall | None:
        """None where frames say all that there is to say."""
        if comm.size == 1 or not self._peers.may_differ:
            return None
        framed = has_frames(self.spec)
        self._calls_first = follows_lr(self.spec) and not framed  # then lengths may differ, on which gloo aborts
        tensors = list(self._numel) if self._finds_unused else []
        return RollCall(comm, tensors, self._calls_first) if tensors or not framed else None

    def _doing(self) -> Doing:
        """On the reporter's thread."""
        busy = self._worker.busy or (self._uncompressed is not None and self._uncompressed.busy)
        return busy, self._exchanged if busy else self._step

    # ---- one bucket ------------------------------------------------------------------------------

    def submit(self, gradient: Gradient, last: bool) -> None:
        """Takes one bucket of this step, and returns at once.

        Args:
            gradient: The bucket; its ``done`` is called when its buffer holds the mean.
            last: Whether it is the last bucket of the step.
        """
        if not self._in_step:
            self._uncompressed_step = self._is_uncompressed()
        self._in_step = not last
        number, nbytes = self._step, gradient.buffer.numel() * gradient.buffer.element_size()
        self._step += last
        self._dense_bytes += all_reduce_traffic(self._comm.size, nbytes).sent
        if self._uncompressed_step:
            self._exchanged = number
            assert self._uncompressed is not None
            self._uncompressed.start(replace(gradient, step=number), last)
            return
        known = replace(gradient, step=number, lr=self._options.lr(), scale=self._options.scale())
        self._handed_over += 1
        self._worker.submit(lambda: self._take(known, last), lambda error: self._complete(known, last, error))

    def _is_uncompressed(self) -> bool:
        """Whether only the mean of the step that begins is wanted. The worker is idle, and all ranks answer alike."""
        every = self._options.check_replicas
        if not self._may_skip_worker or self._comm.size == 1 or self._worker.failed:
            return False
        if (every and self._step % every == 0) or not self._reassembly.is_over(self._step):
            return False
        known = self._store.entries()  # none yet where a state was just loaded
        return bool(known) and all(type(self.spec.active(e.state, self._step)) is Dense for e in known)

    def _fail(self, error: Exception, done: Done) -> None:
        """On gloo's thread. The worker finds out whose fault it is, and refuses all that comes later."""
        self._worker.submit(lambda: _raise(error), done)

    def _take(self, gradient: Gradient, last: bool) -> None:
        """On the worker's thread. While the bytes of a bucket travel, the next one is encoded, if it is there."""
        self._exchanged = gradient.step
        self._taken += 1
        if not self._arrived:
            self._begin_step(gradient)
        self._arrived.append(gradient)
        if self._roll_call is not None:
            self._roll_call.see(gradient.names)
        if not self._reassembly.holds(gradient):
            self._pipeline.start(gradient)
        calls = last and self._roll_call is not None and self._roll_call.ends_step()
        if calls and not self._reassembly.saved:  # else more is to be started
            assert self._roll_call is not None
            self._roll_call.start(gradient.step)
        if last or self._taken == self._handed_over:
            self._pipeline.finish()
        if last:
            self._end_step(gradient.step, calls)

    def _begin_step(self, gradient: Gradient) -> None:
        if self._roll_call is not None and self._calls_first:
            self._roll_call.start(gradient.step, gradient.lr)
            self._roll_call.finish()
        every = self._options.check_replicas
        if every is not None and gradient.step % every == 0:
            replicas.compare(self._replicas(), self._comm.inner, gradient.step)

    def _end_step(self, step: int, calls: bool) -> None:
        late = bool(self._reassembly.saved)
        for whole, put_back in self._reassembly.assembled(step + 1):
            self._pipeline.start(whole)
            self._pipeline.finish()
            put_back()
        idle: frozenset[str] = frozenset()
        if calls:
            assert self._roll_call is not None
            if late:
                self._roll_call.start(step)
            idle = self._roll_call.finish()
        if idle:
            self._zero(idle)
        nonfinite = self._pipeline.commit(idle)
        if not nonfinite:
            return
        self._nonfinite_steps += 1
        if self._options.nonfinite == "skip":
            for gradient in self._arrived:
                gradient.buffer.zero_()
        if self._options.nonfinite == "raise":  # not here, where it would be a failure: all ranks go on alike
            self._verdict = FloatingPointError(
                f"step {step}: the mean gradient of {_some(nonfinite)} is not finite. Nothing of this step is "
                'remembered. With nonfinite="skip" such steps have no effect; a GradScaler needs nonfinite="propagate".'
            )

    def _zero(self, names: frozenset[str]) -> None:
        """The mean of what nobody sent anything of, whatever a method has made of its zeros."""
        for gradient in self._arrived:
            if not names.isdisjoint(gradient.names):
                parts = gradient.buffer.split([self._numel[name] for name in gradient.names])
                for name, part in zip(gradient.names, parts, strict=True):
                    if name in names:
                        part.zero_()

    def _complete(self, gradient: Gradient, last: bool, error: BaseException | None) -> None:
        """On the worker's thread. Together, so that all can still be changed when the last one is known."""
        if not any(gradient is known for known in self._arrived):
            self._arrived.append(gradient)  # refused before it was looked at
        error, self._verdict = error or self._verdict, None
        if last or error is not None:
            for known in self._arrived:
                known.done(error)
            self._arrived.clear()

    # ---- between two steps -----------------------------------------------------------------------

    def metrics(self, norms: bool) -> dict[str, Any]:
        """See ``Handle.metrics``."""
        figures = self._worker.call(lambda: self._books.metrics(self._dense_bytes, norms))
        return {"steps": self._step, "nonfinite_steps": self._nonfinite_steps, **figures}

    def state_dict(self) -> checkpoint.Saved:
        """This rank's state by tensor name."""
        return self._worker.call(lambda: self._books.state_dict(self._step, self._run))

    def load_state_dict(
        self, saved: checkpoint.Saved | checkpoint.Shards, strict: bool, same_buckets: bool = False
    ) -> checkpoint.Saved:
        """Takes up one of the saved states, and returns it. All ranks call it; nothing changes if it fits not on all.

        ``same_buckets``: the host goes on with the buckets that it would have made next, as if nothing had happened.
        """
        try:
            one, pieces = self._worker.call(lambda: self._select(saved, strict))
        except AloneError as error:
            self._worker.call(partial(_raise, error), together=True)  # the others are told
            raise
        self._worker.call(lambda: self._books.load(one, pieces, same_buckets))
        self._step = one["step"]
        self._run = one.get("run", "") or self._run
        return one

    def _select(
        self, saved: checkpoint.Saved | checkpoint.Shards, strict: bool
    ) -> tuple[checkpoint.Saved, dict[str, State]]:
        """What this rank loads, once all others have said that theirs belongs to it."""
        try:
            one, pieces = self._books.select(saved, strict)
        except ValueError as error:
            self._peers.compare_loaded({"refused": str(error)})
            raise
        heard = self._peers.compare_loaded(checkpoint.identity(one))
        for rank, said in heard.items():
            if "refused" in said:
                raise ValueError(f"rank {rank} could not load its state, so no rank did: {said['refused']}")
        if text := checkpoint.disagreement(heard):
            raise ValueError(text)
        if len({said["buckets"] for said in heard.values()}) > 1:  # nobody knows which are right
            one = {**one, "buckets": []}
        return one, pieces

    def flush(self, put: Callable[[str, Tensor], None]) -> None:
        """Sends every residual, uncompressed, and clears it; ``put`` is given each tensor's mean. All ranks call it."""
        self._worker.call(lambda: self._books.flush(put), together=True)

    def scale(self) -> float:
        """What gradients are multiplied by now."""
        return self._options.scale()

    def residuals(self) -> list[tuple[str, Tensor]]:
        """Every tensor's slice of the residual, until the next step. Called while the worker is idle."""
        return self._books.residuals()

    def energy(self, names: tuple[str, ...], gradient: Tensor) -> float:
        """Sum of squares of a bucket's residual and gradient together. Called while the worker is idle."""
        return self._books.energy(names, gradient)

    def end_threads(self) -> None:
        """At the end of the interpreter, if nobody has called ``close``."""
        self._peers.stop()
        self._worker.end(self._peers.abort)

    def close(self) -> None:
        """Waits for the worker and frees its process group. Harmless twice."""
        at_exit.discard(self)
        self._peers.stop()
        if self._worker.stop():
            self._peers.close(self._worker.failed)


def _raise(error: Exception) -> NoReturn:
    raise error


def _some(names: list[str], at_most: int = 5) -> str:
    return ", ".join(names[:at_most]) + (f" and {len(names) - at_most} more" if len(names) > at_most else "")
