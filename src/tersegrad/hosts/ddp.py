"""attach(): the host for DistributedDataParallel. It knows DDP's hook, its buckets and its futures, and nothing else.

DDP hands over one bucket after another while backward is still running. Each goes to the engine, which calls back when
it holds the mean. DDP makes new buckets after the first steps; the engine finds their state by parameter name.
(No ``from __future__ import annotations`` here: DDP compares the hook's annotations as objects.)
"""

import hashlib
import math
import weakref
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # as torch.distributed, which does not export it to type checkers
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tersegrad.core import Comm, Reducer, Spec, needs_of
from tersegrad.core.memory_format import shape_of
from tersegrad.engine import Engine, Gradient, Options, Processes
from tersegrad.hosts import _checks
from tersegrad.hosts._ready_order import ReadyOrder
from tersegrad.hosts._squares import squares_for
from tersegrad.hosts.handle import Handle
from tersegrad.hosts.parameter_shift import ParameterShift, in_a_backward, when_backward_has_ended
from tersegrad.per_sample import SquaredGradients
from tersegrad.reducers import Dense
from tersegrad.specs import parse_reducer


def attach(
    model: DistributedDataParallel,
    spec: str | Spec,
    *,
    network: Callable[[Comm], Comm] | None = None,
    seed: int = 0,
    timeout: float = 300.0,
    group: dist.ProcessGroup | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    nonfinite: str = "propagate",
    check_replicas: int | None = None,
) -> Handle:
    """Makes a DDP model average its gradients by ``spec``. Every rank calls it, once, after wrapping the model in DDP.

    ``spec``, ``seed``, ``nonfinite``, ``check_replicas`` and whether there is a ``scaler`` must be the same on all.

    Args:
        model: A DDP model with its parameters on the CPU.
        spec: A preset, an expression or a reducer object; the same on every rank.
        network: Wraps the communication, e.g. ``Throttled("100Mbit")``.
        seed: Feeds all randomness of the method.
        timeout: Seconds that a worker waits for another before it gives up; that of a ``group`` is set to it.
        group: A gloo group for our use alone. Needed only for a model that lives on some of the ranks, because all
            ranks must take part in making a group.
        optimizer: Tells the learning rate (the highest of its groups) to specs that follow it (``Schedule``), must have
            no momentum where the spec has (``MomentumCorrection``, ``SignSGD(momentum=...)``), and is an SGD for
            ``StepAhead``. These specs insist on it.
        scaler: The GradScaler of mixed precision: residuals are then kept in unscaled units, and survive a change of
            the scale.
        nonfinite: What becomes of a step with a NaN or an infinity on any rank: "propagate" (all ranks get it, so that
            a GradScaler skips the step), "skip" (all gradients of the step are zero) or "raise". In all three, whatever
            is remembered is what it was before the step.
        check_replicas: n compares the parameters of all ranks in every n-th step, and names the first that differs.

    Returns:
        The handle: metrics, state, ``flush`` and ``close``.

    Raises:
        TypeError: ``model`` is no DDP model, or ``spec`` is a compressor.
        ValueError: The spec cannot work with this model, optimizer or group; or ranks disagree about it.
        RuntimeError: The model is attached already, or another hook is registered.

    Example:
        >>> handle = tersegrad.attach(DistributedDataParallel(model), "topk")  # doctest: +SKIP
    """
    reducer = parse_reducer(spec)
    _checks.require_process_group()
    _checks.require_ddp(model)
    _checks.require_own_group(model.process_group, group)
    options = Options(network, seed, timeout, group, optimizer, scaler, nonfinite, check_replicas)
    _checks.require_optimizer(reducer, optimizer)
    _checks.require_gradients(reducer, model)
    _checks.warn_if_nothing_is_compressed(reducer, model.module)
    _checks.warn_of_unsigned_sums(reducer)
    slot = _slots.get(model)
    if slot is not None and slot.attachment is not None:
        raise RuntimeError(
            f"this model is attached already, to {slot.attachment.engine.spec!r}. Call close() on that handle first, "
            "or attach once with ByName({...}) to treat parameters differently."
        )
    attachment = _Attachment(model, reducer, options)
    if slot is None:
        slot = _Slot(model.process_group)
        try:
            model.register_comm_hook(slot, _hook)
        except RuntimeError as error:
            attachment.handle.close()
            raise RuntimeError(
                f"this model has a communication hook already ({error}), and DDP takes only one. "
                "Remove that register_comm_hook call, or wrap the module in a new DistributedDataParallel."
            ) from error
        _slots[model] = slot
    slot.attachment = attachment
    return attachment.handle


class _Slot:
    """What DDP holds for the life of the model; a hook cannot be taken off, but the slot can be empty."""

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        self.process_group = process_group
        self.attachment: _Attachment | None = None

    def __reduce__(self) -> "tuple[type[_Slot], tuple[()]]":
        """A copy of the model, by deepcopy or pickle, is not attached: DDP copies the list of hooks, not the hooks."""
        return _Slot, ()


_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, _Slot]" = weakref.WeakKeyDictionary()


def _hook(slot: _Slot, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if slot.attachment is None:  # closed: plain DDP from here on
        return allreduce_hook(slot.process_group, bucket)  # type: ignore[arg-type]  # None: the default group
    return slot.attachment.on_bucket(bucket)


class _Attachment:
    """Between DDP and the engine: names of parameters, futures, squares."""

    def __init__(self, model: DistributedDataParallel, spec: Reducer, options: Options):
        everything = dict(model.module.named_parameters())
        # DDP has cut its buckets already: some that are frozen now may be in them, and none that it was told to ignore.
        reduced = {name: p for name, p in everything.items() if name not in model.parameters_to_ignore}
        self._name_of = {id(p): name for name, p in everything.items()}
        self._compresses = not isinstance(spec, Dense)
        self._names: dict[tuple[int, ...], tuple[str, ...]] = {}  # of the tensors in a bucket, by their ids
        self._squares = squares_for(spec, model.module)
        self._square_sums: dict[tuple[str, ...], Tensor] = {}  # by bucket; the model's hooks add to them
        self._shift: ParameterShift | None = None
        self._error: BaseException | None = None  # of this step
        self.engine = Engine(
            spec,
            {name: shape_of(p) for name, p in reduced.items()},
            options,
            Processes(model.process_group, options),
            lambda: {name: self._unshifted(p) for name, p in reduced.items()},
            frozenset(name for name, p in reduced.items() if p.requires_grad),
            model.find_unused_parameters,
            _facts(model, reduced),
        )
        lookahead = needs_of(spec).lookahead
        if lookahead:
            assert options.optimizer is not None, "refused before"
            self._shift = ParameterShift(options.optimizer, lookahead, lambda: self._residuals(reduced), options.scale)
            self._shift.watch(model)
        self._order = ReadyOrder(model, reduced)
        self.handle = Handle(self.engine, reduced, self._shift, self._order.final_buckets, self._detach)

    def _unshifted(self, parameter: Tensor) -> Tensor:
        return parameter if self._shift is None else self._shift.unshifted(parameter)

    def _residuals(self, parameters: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(parameters[name], residual) for name, residual in self.engine.residuals()]

    def _detach(self, handle: Handle) -> None:
        for slot in list(_slots.values()):
            if slot.attachment is self:
                slot.attachment = None
        self._order.close()
        if self._squares is not None:
            self._squares.close()

    def on_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Called by DDP in backward: hands the bucket over, returns at once."""
        if not isinstance(bucket, GradBucket):
            raise TypeError(
                f"DDP handed the hook a {type(bucket).__name__} instead of a bucket, as it does with torch.compile's "
                'optimize_ddp="python_reducer". Use torch._dynamo.config.optimize_ddp = "ddp_optimizer".'
            )
        self._order.stop_in_time()
        parameters, buffer, last = bucket.parameters(), bucket.buffer(), bucket.is_last()
        names = self._names_in(parameters)
        if self._compresses:
            _checks.require_strided(buffer, names)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        squares = None if self._squares is None else self._squares_in(self._squares, names, parameters)
        in_backward = in_a_backward()  # not in Join's, for ranks that have no more inputs
        if last and in_backward:
            if self._shift is not None:
                self._shift.restore_after_backward()
            when_backward_has_ended(self._raise_error)
        self.engine.submit(Gradient(names, buffer, partial(self._done, future, buffer), squares), last)
        return future if in_backward else future.then(self._unwrap)

    def _done(self, future: "torch.futures.Future[torch.Tensor]", buffer: Tensor, error: BaseException | None) -> None:
        """On any thread. What a future raises loses its type on the way, so the error is raised after backward."""
        if error is not None:
            self._error = self._error or error
            buffer.fill_(math.nan)  # nobody shall take it for a gradient
        future.set_result(buffer)

    def _unwrap(self, future: "torch.futures.Future[torch.Tensor]") -> Tensor:
        self._raise_error()
        return future.value()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _names_in(self, parameters: list[Tensor]) -> tuple[str, ...]:
        key = tuple(map(id, parameters))
        if key not in self._names:
            self._names[key] = tuple(self._name_of[i] for i in key)
        return self._names[key]

    def _squares_in(self, recorder: SquaredGradients, names: tuple[str, ...], parameters: list[Tensor]) -> Tensor:
        """The squares of a bucket that is ready; they live in one flat tensor a bucket."""
        if names not in self._square_sums:  # DDP has made new buckets
            known = self._square_sums.items()
            self._square_sums = {other: sums for other, sums in known if set(names).isdisjoint(other)}
            sums = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
            self._square_sums[names] = sums
            recorder.place(parameters, sums)
        return self._square_sums[names]


def _facts(model: DistributedDataParallel, parameters: dict[str, Tensor]) -> dict[str, object]:
    """What of a model must be the same on all ranks; of its tensors a hash, which is shorter."""
    tensors = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters.items()]
    return {
        "find_unused_parameters": model.find_unused_parameters,
        "names, shapes and dtypes": hashlib.blake2b(repr(tensors).encode(), digest_size=8).hexdigest(),
    }
