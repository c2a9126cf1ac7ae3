"""attach(): the only file that knows DDP and futures.

DDP hands over one bucket after another while backward is still running. Each is queued for ONE worker thread
(``worker.py``), which runs the blocking reducer on a process group of its own and completes the bucket's future with
the mean. Collectives never run inside future callbacks: on gloo that hangs as soon as there are two buckets. A step of
which only the mean is wanted needs no worker: its buckets go to that process group at once, as DDP itself would do it.

State is kept per bucket and found by parameter name: DDP cuts its buckets anew after the first steps.
(No ``from __future__ import annotations`` here: DDP compares the hook's annotations as objects.)
"""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # as torch.distributed, which does not export it to type checkers
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad import checkpoint, faults, kernels, local, replicas
from tersegrad import state as states
from tersegrad.ahead import Ahead, Waiting
from tersegrad.comm import NetworkError, TorchComm, all_reduce_traffic
from tersegrad.core import Bucket, Comm, Finish, Reducer, Spec, State
from tersegrad.layout import shaped
from tersegrad.per_sample import PerBackward, PerSample, SquaredGradients
from tersegrad.spec import parse_reducer
from tersegrad.taps import Metered, Span
from tersegrad.worker import Underway, Worker

NONFINITE = ("propagate", "skip", "raise")
STEPS_TO_REBUILD = 3  # DDP cuts its final buckets after the first step, or the second with a static graph


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
) -> "Handle":
    """Makes a DDP model average its gradients by ``spec``: a preset, an expression or a reducer object.

    Every rank calls it, with the same spec, once, after wrapping the model in DDP. ``network`` wraps the communication,
    e.g. ``Throttled("100Mbit")``. ``seed`` feeds all randomness of the method. ``timeout`` is how many seconds a worker
    waits for another before it gives up. ``group`` is a gloo group for our use alone; it is needed only for a model
    that lives on some of the ranks, because all ranks must take part in making a group. ``optimizer`` tells the
    learning rate (the highest of its groups) to specs that follow it (``Schedule``), must have no momentum where the
    spec has (``MomentumCorrection``), and is an SGD where parameters step ahead (``StepAhead``).

    ``scaler`` is the GradScaler of mixed precision: what a method remembers is then kept in unscaled units, and
    survives a change of the scale. ``nonfinite`` says what becomes of a step with a NaN or an infinity on any rank:
    "propagate" (all ranks get it, so that a GradScaler skips the step), "skip" (all gradients of the step are zero) or
    "raise". In all three, whatever is remembered is what it was before the step. ``check_replicas=n`` compares the
    parameters of all ranks in every n-th step, and names the first that differs.
    """
    reducer = parse_reducer(spec)
    _refuse_what_cannot_work(model, timeout, group)
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite={nonfinite!r}: write one of {', '.join(map(repr, NONFINITE))}.")
    if check_replicas is not None and (type(check_replicas) is not int or check_replicas < 1):
        raise ValueError(f"check_replicas={check_replicas!r}: write a number of steps, e.g. 100, or None for never.")
    _refuse_the_optimizer(reducer, optimizer)
    slot = _slots.get(model)
    if slot is not None and slot.handle is not None:
        raise RuntimeError(
            f"this model is attached already, to {slot.handle.spec!r}. Call close() on that handle first, "
            "or attach once with ByName({...}) to treat parameters differently."
        )
    options = _Options(network, seed, timeout, group, optimizer, scaler, nonfinite, check_replicas)
    handle = Handle(model, reducer, options)
    if slot is None:
        slot = _Slot(model.process_group)
        try:
            model.register_comm_hook(slot, _hook)
        except RuntimeError as error:
            handle.close()
            raise RuntimeError(
                f"this model has a communication hook already ({error}), and DDP takes only one. "
                "Remove that register_comm_hook call, or wrap the module in a new DistributedDataParallel."
            ) from error
        _slots[model] = slot
    slot.handle = handle
    return handle


def _refuse_what_cannot_work(model: Any, timeout: float, group: dist.ProcessGroup | None) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "the process group is not initialised. Start the script with torchrun and call "
            'torch.distributed.init_process_group("gloo") before attach().'
        )
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach() needs a DistributedDataParallel model, and this is a {type(model).__name__}. "
            "Write: model = DistributedDataParallel(model); tersegrad.attach(model, ...)."
        )
    devices = {p.device.type for p in model.parameters() if p.requires_grad}
    if devices - {"cpu"}:
        raise ValueError(
            f"the model's parameters are on {', '.join(sorted(devices))}. This version has only been run with "
            "parameters on the CPU and the gloo backend, so it refuses anything else."
        )
    ranks = dist.get_process_group_ranks(model.process_group)
    if group is None and len(ranks) < dist.get_world_size():
        raise ValueError(
            f"the model lives on ranks {ranks} of {dist.get_world_size()}, and a process group can only be made by all "
            f"ranks together. Write on every rank: group = torch.distributed.new_group({ranks}, backend='gloo'); and "
            "where the model is: tersegrad.attach(model, ..., group=group)."
        )
    if group is not None and (group is model.process_group or dist.get_process_group_ranks(group) != ranks):
        raise ValueError(
            f"group must be a group of its own with the ranks of the model, {ranks}: collectives of two users in one "
            "group get mixed up. Make another one with torch.distributed.new_group."
        )
    if timeout <= 0:
        raise ValueError(f"timeout={timeout!r}: give the seconds to wait for another worker, e.g. timeout=300.")


def _refuse_the_optimizer(reducer: Reducer, optimizer: torch.optim.Optimizer | None) -> None:
    parts = [part for part in reducer.walk() if isinstance(part, Reducer)]
    if optimizer is None:
        if any(part.follows_lr for part in parts):
            raise ValueError(f"{reducer!r} follows the learning rate. Write attach(model, ..., optimizer=optimizer).")
        return
    if any(part.ahead for part in parts[1:]):
        raise ValueError(
            f"{reducer!r}: a step ahead is made by all parameters, whatever is done with their gradients. "
            "Write StepAhead(...) around all the rest."
        )
    if reducer.ahead and not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(
            f"{reducer!r} moves parameters by (learning rate) * gradient, which is the step of torch.optim.SGD and not "
            f"of {type(optimizer).__name__}. Leave StepAhead out, and write what is inside it alone."
        )
    twice = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
    if twice and any(part.brings_momentum for part in parts):
        raise ValueError(
            f"{reducer!r} has momentum, and so has the optimizer (momentum={twice}): it would be applied twice. Give "
            "the optimizer momentum=0, as the method's paper does."
        )


class _Slot:
    """What DDP holds for the life of the model; a hook cannot be taken off, but the slot can be empty."""

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        self.process_group = process_group
        self.handle: Handle | None = None

    def __reduce__(self) -> "tuple[type[_Slot], tuple[()]]":
        """A copy of the model, by deepcopy or pickle, is not attached: DDP copies the list of hooks, not the hooks."""
        return _Slot, ()


_slots: "weakref.WeakKeyDictionary[DistributedDataParallel, _Slot]" = weakref.WeakKeyDictionary()


def _hook(slot: _Slot, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if slot.handle is None:  # closed: plain DDP from here on
        return allreduce_hook(slot.process_group, bucket)  # type: ignore[arg-type]  # None: the default group
    return slot.handle._on_bucket(bucket)


@dataclass
class _Entry:
    """One bucket as it is reduced now, with its state."""

    bucket: Bucket
    state: State
    wide: Tensor | None  # float32 copy of a bucket in another dtype; None if it is reduced as it is


@dataclass(frozen=True)
class _Options:
    """What ``attach`` was told."""

    network: Callable[[Comm], Comm] | None
    seed: int
    timeout: float
    group: dist.ProcessGroup | None
    optimizer: torch.optim.Optimizer | None
    scaler: torch.amp.GradScaler | None
    nonfinite: str
    check_replicas: int | None

    def lr(self) -> float | None:
        """The learning rate now, where it is known."""
        return None if self.optimizer is None else max(float(g["lr"]) for g in self.optimizer.param_groups)

    def scale(self) -> float:
        """What the loss of this step was multiplied by."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())


@dataclass(frozen=True)
class _Arrival:
    """One bucket that DDP has handed over, and what was known at that moment."""

    buffer: Tensor
    parameters: list[Tensor]
    squares: Tensor | None
    lr: float | None
    scale: float
    step: int
    future: torch.futures.Future[Any]

    def part(self, whole: Tensor, place: int) -> Tensor:
        """One parameter's stretch of ``whole``."""
        start = sum(p.numel() for p in self.parameters[:place])
        return whole[start : start + self.parameters[place].numel()]


class Handle:
    """A running attachment: metrics, state, close."""

    def __init__(self, model: DistributedDataParallel, spec: Reducer, options: _Options):
        self.spec = spec
        self._options = options
        self._names = {id(p): name for name, p in model.module.named_parameters()}
        self._parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self._all_parameters = dict(model.module.named_parameters())
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._pieces: dict[str, State] = {}  # state by parameter name that no bucket has claimed yet
        self._layout: list[list[str]] = []  # names in the buckets of a loaded state, until DDP has cut the same again
        self._arrived: list[_Arrival] = []  # of this step; their futures complete together
        self._staged: list[_Arrival] = []  # those of them that the layout cuts otherwise
        self._squares = _squares_for(spec, model.module)
        self._square_sums: dict[tuple[int, ...], Tensor] = {}  # by bucket; the model's hooks add to them
        self._step = 0
        self._in_step = False  # some of its buckets have come, and not the last
        self._plain = False  # this step's buckets go to the process group without the worker
        self._underway = Underway()
        self._loaded_at = 0
        self._poisoned: list[str] = []  # parameters of this step whose mean is not finite
        self._nonfinite_steps = 0
        self._dense_bytes = 0
        self._exchanged = 0  # the step that the worker is in
        self._handed_over = self._taken = 0  # buckets, to the worker and by it
        self._ahead: Ahead | None = None
        self._unfinished: Callable[[], None] | None = None  # the bucket whose bytes are on their way
        self._own_group = options.group is None
        self._group: dist.ProcessGroup | None = None
        self._worker = Worker(lambda error: self._board.explain(error))
        self._board = faults.Board(model.process_group, options.group, self._doing)
        try:
            self._group = options.group or self._new_group()
            self._torch_comm = TorchComm(self._group)
            comm: Comm = self._torch_comm
            self._comm = Metered(options.network(comm) if options.network is not None else comm)
            self._worker.call(self._agree, together=True)
            _warm_up(spec)
            if spec.ahead:
                assert options.optimizer is not None, "refused before"
                self._ahead = Ahead(model, options.optimizer, spec.ahead, self._waiting, options.scale)
        except BaseException:
            self.close()
            raise

    def _new_group(self) -> dist.ProcessGroup:
        try:
            group: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=self._options.timeout), backend="gloo")
            return group
        except RuntimeError as error:
            raise self._board.explain(NetworkError(str(error))) from error

    def _doing(self) -> faults.Doing:
        busy = self._worker.busy or self._underway.count > 0
        return busy, self._exchanged if busy else self._step

    def _agree(self) -> None:
        """All workers say what they are about to do; whoever differs is named on every worker."""
        numel = sum(p.numel() for p in self._parameters.values())
        mine = f"tersegrad {tersegrad.__version__}, {self.spec!r}, {numel} parameters"
        said = self._comm.inner.all_gather(torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8))
        texts = [bytes(text.tolist()).decode(errors="replace") for text in said]
        if len(set(texts)) > 1:
            lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
            raise ValueError(f"the workers do not agree:\n{lines}\nCall attach() with the same spec on every worker.")

    # ---- one bucket ------------------------------------------------------------------------------

    def _on_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Called by DDP in backward: queue the bucket, return at once."""
        if not isinstance(bucket, GradBucket):
            raise TypeError(
                f"DDP handed the hook a {type(bucket).__name__} instead of a bucket, as it does with torch.compile's "
                'optimize_ddp="python_reducer". Use torch._dynamo.config.optimize_ddp = "ddp_optimizer".'
            )
        last = bucket.is_last()
        if not self._in_step:
            self._plain = self._is_plain()
        self._in_step = not last
        if self._plain:
            return self._start_plain(bucket, last)
        parameters = bucket.parameters()
        squares = None if self._squares is None else self._squares_of(self._squares, parameters)
        arrival = _Arrival(
            bucket.buffer(),
            parameters,
            squares,
            self._options.lr(),
            self._options.scale(),
            self._step,
            torch.futures.Future(),
        )
        self._step += last
        if last and self._ahead is not None:
            self._ahead.back_after_backward()
        self._handed_over += 1
        self._worker.submit(lambda: self._arrive(arrival, last), lambda error: self._complete(arrival, last, error))
        return arrival.future.then(_unwrap)

    def _is_plain(self) -> bool:
        """Whether all that is wanted of the step that begins is the mean. The worker is idle, and all ranks agree."""
        options, every = self._options, self._options.check_replicas
        if options.network is not None or options.scaler is not None or options.nonfinite != "propagate":
            return False
        if (
            self._squares is not None
            or self._comm.size == 1
            or self._worker.failed
            or (every and self._step % every == 0)
        ):
            return False
        if self._layout or self._step - self._loaded_at < STEPS_TO_REBUILD:
            return False  # which buckets there will be is not known yet
        return all(self.spec.plain(e.state, self._step) for e in self._entries.values())

    def _start_plain(self, bucket: GradBucket, last: bool) -> torch.futures.Future[torch.Tensor]:
        """As DDP itself does it: no other thread has to wake up for a bucket, which on busy cores takes its time."""
        assert self._group is not None
        buffer, self._exchanged = bucket.buffer(), self._step
        self._step += last
        traffic = all_reduce_traffic(self._comm.size, buffer.numel() * buffer.element_size())
        self._comm.saw(traffic, time.perf_counter())
        self._dense_bytes += traffic.sent
        self._underway.begin()
        work = dist.all_reduce(buffer.div_(self._comm.size), group=self._group, async_op=True)
        assert work is not None
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(self._finish_plain)
        return future

    def _finish_plain(self, future: torch.futures.Future[Any]) -> Tensor:
        """On gloo's thread. What went wrong is explained by the worker, as it always is."""
        self._comm.timing.wait += self._underway.end()
        try:
            mean: Tensor = future.value()[0]
        except RuntimeError as error:
            lost = NetworkError(str(error))
            return self._worker.call(lambda: _fail(lost), together=True)
        return mean

    def _complete(self, arrival: _Arrival, last: bool, error: BaseException | None) -> None:
        """DDP waits for all buckets anyway; together they can still be changed when the last one is known."""
        if not any(arrival is known for known in self._arrived):
            self._arrived.append(arrival)  # refused before it was looked at
        if last or error is not None:
            for known in self._arrived:
                known.future.set_result((known.buffer, error))
            self._arrived.clear()

    def _squares_of(self, recorder: SquaredGradients, parameters: list[Tensor]) -> Tensor:
        """The squares of a bucket that is ready; they live in one flat tensor a bucket."""
        key = tuple(map(id, parameters))
        if key not in self._square_sums:  # DDP has cut anew
            members = set(key)
            self._square_sums = {k: sums for k, sums in self._square_sums.items() if members.isdisjoint(k)}
            self._square_sums[key] = torch.zeros(sum(p.numel() for p in parameters))
            recorder.place(parameters, self._square_sums[key])
        return self._square_sums[key]

    def _arrive(self, arrival: _Arrival, last: bool) -> None:
        """On the worker thread: reduces the bucket, or keeps it until all are there that the layout mixes.

        While the bytes of a bucket travel, the next one is coded, if it is there already.
        """
        self._exchanged = arrival.step
        self._taken += 1
        if not self._arrived:
            self._compare_replicas(arrival.step)
        self._arrived.append(arrival)
        names = [self._names[id(p)] for p in arrival.parameters]
        if self._layout and names not in self._layout:
            self._staged.append(arrival)
        else:
            self._start(arrival)
        if last or self._taken == self._handed_over:
            self._finish()
        if last:
            self._reduce_staged()
            self._settle()

    def _compare_replicas(self, step: int) -> None:
        every = self._options.check_replicas
        if every is not None and step % every == 0:
            at_home = (lambda p: p) if self._ahead is None else self._ahead.at_home
            replicas.compare({name: at_home(p) for name, p in self._all_parameters.items()}, self._comm.inner, step)

    def _start(self, arrival: _Arrival) -> None:
        """Sends this bucket; only then the one before is waited for."""
        before, self._unfinished = self._unfinished, None  # if something fails here, nobody holds on to its messages
        buffer, parameters, squares = arrival.buffer, arrival.parameters, arrival.squares
        key = tuple(map(id, parameters))
        entry = self._entries.get(key) or self._new_entry(key, buffer, parameters)
        entry.bucket.step, entry.bucket.lr, entry.bucket.squares = arrival.step, arrival.lr, squares
        self._comm.begin(entry.bucket.id)
        mean = buffer if entry.wide is None else entry.wide.copy_(buffer)
        if arrival.scale != 1.0:
            mean.div_(arrival.scale)
        finish_reduce = self.spec.start(entry.bucket, mean, mean, entry.state, self._comm)
        span = self._comm.pause()
        if before is not None:
            before()
        self._unfinished = lambda: self._put_mean(arrival, entry, mean, finish_reduce, span)

    def _finish(self) -> None:
        """Waits for what was started last."""
        finish, self._unfinished = self._unfinished, None
        if finish is not None:
            finish()

    def _put_mean(self, arrival: _Arrival, entry: _Entry, mean: Tensor, finish_reduce: Finish, span: Span) -> None:
        """The mean over all workers takes the place of the gradient."""
        buffer, squares, scale = arrival.buffer, arrival.squares, arrival.scale
        self._comm.resume(span)
        finite = finish_reduce()
        if squares is not None:
            squares.zero_()
        self._poisoned += [] if finite else self._nonfinite_in(mean, entry)
        if scale != 1.0:
            mean.mul_(scale)
        if entry.wide is not None:
            buffer.copy_(entry.wide)
        self._comm.end()
        nbytes = buffer.numel() * buffer.element_size()
        self._dense_bytes += all_reduce_traffic(self._comm.size, nbytes).sent

    def _nonfinite_in(self, mean: Tensor, entry: _Entry) -> list[str]:
        """The parameters whose mean is not finite; looked at only if it matters to somebody."""
        matters = entry.state or self._options.nonfinite != "propagate"
        if not matters or kernels.on(mean).all_finite(mean):
            return []
        parts = zip(entry.bucket.names, mean.split(entry.bucket.sizes), strict=True)
        return [name for name, part in parts if not bool(part.isfinite().all())]

    def _reduce_staged(self) -> None:
        """After a restart DDP's first buckets are not those that the state was saved in; these are made here.

        So that what a method does with a bucket is what it would have done without the restart, to the bit.
        """
        if self._staged:
            places = {id(p): (a, i) for a in self._staged for i, p in enumerate(a.parameters)}
            for names in self._layout:
                self._reduce_assembled([places[id(self._parameters[name])] for name in names])
            self._staged.clear()
        if self._step - self._loaded_at >= STEPS_TO_REBUILD:
            self._layout = []

    def _reduce_assembled(self, members: list[tuple[_Arrival, int]]) -> None:
        """One bucket of the layout, out of stretches of others and back."""
        about = members[0][0]
        buffers = [a.part(a.buffer, i) for a, i in members]
        squares = [a.part(a.squares, i) for a, i in members if a.squares is not None]
        whole = replace(
            about,
            buffer=torch.cat(buffers),
            parameters=[a.parameters[i] for a, i in members],
            squares=torch.cat(squares) if squares else None,
        )
        self._start(whole)
        self._finish()
        torch._foreach_copy_(buffers, whole.buffer.split([b.numel() for b in buffers]))
        for part in squares:
            part.zero_()

    def _settle(self) -> None:
        """After the last bucket: the step is kept, or forgotten in all buckets if any of its means is not finite.

        All workers hold the same means, so they decide alike.
        """
        poisoned, self._poisoned = self._poisoned, []
        for entry in self._entries.values():
            states.settle(entry.state, keep=not poisoned)
        if not poisoned:
            return
        self._nonfinite_steps += 1
        if self._options.nonfinite == "skip":
            for arrival in self._arrived:
                arrival.buffer.zero_()
        if self._options.nonfinite == "raise":
            raise FloatingPointError(
                f"step {self._step - 1}: the mean gradient of {_some(poisoned)} is not finite. Nothing of this step is "
                'remembered. With nonfinite="skip" such steps have no effect; a GradScaler needs nonfinite="propagate".'
            )

    def _new_entry(self, key: tuple[int, ...], buffer: Tensor, parameters: list[Tensor]) -> _Entry:
        """A bucket that was not seen before: DDP has cut anew, so the state of its tensors is gathered by name."""
        names = tuple(self._names[id(p)] for p in parameters)
        self._release(names)
        bucket = Bucket(names, tuple(tuple(p.shape) for p in parameters), seed=self._options.seed)
        state = self.spec.init(bucket, self._comm.inner)
        states.paste(self._pieces, state, bucket)
        for name in names:
            self._pieces.pop(name, None)
        as_it_is = buffer.dtype == torch.float32 or (self.spec.any_dtype and self._options.scaler is None)
        wide = None if as_it_is else torch.empty(buffer.numel(), dtype=torch.float32)
        entry = self._entries[key] = _Entry(bucket, state, wide)
        return entry

    def _release(self, names: tuple[str, ...]) -> None:
        """Cuts every bucket that holds one of these tensors back into pieces."""
        for key, entry in list(self._entries.items()):
            if not set(names).isdisjoint(entry.bucket.names):
                self._pieces |= states.cut(entry.state, entry.bucket)
                del self._entries[key]

    # ---- for the user ----------------------------------------------------------------------------

    def metrics(self, norms: bool = True) -> dict[str, Any]:
        """Totals since attach, on this rank. Bytes are those that left this worker, headers and padding included.

        ``ratio`` compares with what a plain all-reduce of the same gradients would have sent. ``density`` is the
        fraction of elements that this rank's sparse methods sent in the last step; ``empty_sends`` counts the times a
        bucket had nothing to send; ``nonfinite_steps`` the steps that were undone; a dense step has nothing to undo.
        ``layers`` holds what a method says about single layers (GradiVeQ). ``norms=False`` leaves out the norm of the
        residual, which alone has to read as many numbers as there are parameters.
        """
        return self._worker.call(lambda: self._metrics(norms))

    def _metrics(self, norms: bool) -> dict[str, Any]:
        total, timing = self._comm.total, self._comm.timing
        entries = [entry.state for entry in self._entries.values()]
        sent, of = (sum(n for state in entries for n in _numbers(state, key)) for key in ("_sent", "_of"))
        return {
            "spec": repr(self.spec),
            "steps": self._step,
            "nonfinite_steps": self._nonfinite_steps,
            "buckets": len(self._entries),
            "bytes_sent": total.sent,
            "bytes_handed_over": total.payload,
            "dense_bytes": self._dense_bytes,
            "ratio": self._dense_bytes / total.sent if total.sent else 1.0,
            "encode_seconds": timing.encode,
            "wait_seconds": timing.wait,
            "decode_seconds": timing.decode,
            "density": sent / of if of else 1.0,
            "empty_sends": sum(n for state in entries for n in _numbers(state, "empty")),
            "collectives": {name: meter.calls for name, meter in self._comm.by_collective.items()},
            "layers": self._reports(),
            **({"residual_norm": _residual_norm(entries)} if norms else {}),
        }

    def _reports(self) -> dict[str, Any]:
        """What a method has to say about single layers (``report`` in their state), by parameter name."""
        pieces = (piece for e in self._entries.values() for piece in states.cut(e.state, e.bucket).items())
        return {name: report for name, piece in pieces for report in _numbers(piece, "report")}

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory by parameter name: plain tensors and numbers. Save one per rank, beside the model."""
        return self._worker.call(self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        pieces = dict(self._pieces)
        for entry in self._entries.values():
            pieces |= states.cut(entry.state, entry.bucket)
        return {
            "format": checkpoint.FORMAT,
            "spec": repr(self.spec),
            "step": self._step,
            "rank": self._comm.rank,
            "ranks": self._comm.size,
            "buckets": self._layout or [list(entry.bucket.names) for entry in self._entries.values()],
            "tensors": {name: states.copy(piece) for name, piece in pieces.items()},
            **({} if self._ahead is None else {"share": self._ahead.share}),
        }

    def load_state_dict(self, saved: dict[str, Any] | Iterable[dict[str, Any]], strict: bool = True) -> None:
        """Takes up what ``state_dict`` saved, whatever the buckets were then. Nothing changes if it does not fit.

        ``saved`` is what this rank saved; or, where the number of ranks has changed, the states of all ranks that saved
        one, in any order (a generator that loads one after the other will do): then every rank takes the mean of what
        they remembered, so that the mean over ranks stays what it was. With ``strict=False``, entries that the model
        does not have or whose shapes differ are left out, and parameters without an entry begin anew.
        """
        self._worker.call(lambda: self._load_state_dict(saved, strict))

    def _load_state_dict(self, saved: dict[str, Any] | Iterable[dict[str, Any]], strict: bool) -> None:
        one = checkpoint.only(saved, self._comm.rank, self._comm.size)
        sizes = {name: p.numel() for name, p in self._parameters.items()}
        pieces = checkpoint.require_fit(one, self.spec, sizes, self._fresh_piece, strict)
        self._pieces = {name: states.copy(piece) for name, piece in pieces.items()}
        self._entries.clear()
        self._step = self._loaded_at = one["step"]
        if self._ahead is not None:
            self._ahead.share = one.get("share", 1.0)
        self._layout = [names for names in one["buckets"] if names]
        if sorted(name for names in self._layout for name in names) != sorted(self._parameters):
            self._layout = []  # another model: its own buckets will do

    def _fresh_piece(self, name: str) -> State:
        """What a parameter's state looks like in the beginning."""
        bucket = Bucket((name,), (tuple(self._parameters[name].shape),), seed=self._options.seed)
        return states.cut(self.spec.init(bucket, self._comm.inner), bucket)[name]

    def flush(self) -> None:
        """Puts the mean of all that is still delayed into the parameters' ``.grad``, and forgets it; all ranks call it.

        For the end of training, and before the learning rate drops: then ``optimizer.step()`` applies it. What was in
        ``.grad`` is replaced. It goes out dense, in float32: as many bytes as one plain step.
        """
        self._worker.call(self._flush, together=True)

    def _flush(self) -> None:
        for entry in self._entries.values():
            self._flush_bucket(entry.bucket, entry.state)
        if self._pieces:
            bucket, state = self._unclaimed()
            self._flush_bucket(bucket, state)
            self._pieces |= states.cut(state, bucket)

    def _unclaimed(self) -> tuple[Bucket, State]:
        """What was loaded and is in no bucket yet, in one."""
        names = tuple(name for name in self._parameters if name in self._pieces)
        bucket = Bucket(names, tuple(tuple(self._parameters[name].shape) for name in names), seed=self._options.seed)
        state = self.spec.init(bucket, self._comm.inner)
        states.paste(self._pieces, state, bucket)
        return bucket, state

    def _waiting(self) -> Waiting:
        """Between two steps, in which the worker is idle."""
        kept = [(entry.bucket, entry.state) for entry in self._entries.values()]
        for bucket, state in [*kept, self._unclaimed()] if self._pieces else kept:
            waits = self.spec.waiting(bucket, state)
            if waits is not None:
                parameters = [self._parameters[name] for name in bucket.names]
                yield from zip(parameters, waits.split(bucket.sizes), strict=True)

    def _flush_bucket(self, bucket: Bucket, state: State) -> None:
        total = torch.zeros(bucket.numel)
        self.spec.flush(bucket, total, state)
        self._comm.all_reduce(total)
        states.settle(state, keep=True)
        for name, part in zip(bucket.names, total.div_(self._comm.size).split(bucket.sizes), strict=True):
            parameter = self._parameters[name]
            mean = shaped(part, parameter).to(parameter.dtype)
            if parameter.grad is None:
                parameter.grad = mean.clone()
            else:
                parameter.grad.copy_(mean)

    def close(self) -> None:
        """Waits for the worker, frees its process group, and gives the model back to plain DDP. Harmless twice."""
        for slot in list(_slots.values()):
            if slot.handle is self:
                slot.handle = None
        if self._squares is not None:
            self._squares.close()
        if self._ahead is not None:
            self._ahead.close()
        self._board.stop()
        if self._worker.stop() and self._own_group and self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            # gloo's thread spins on sockets that another rank has closed, until nobody holds the group here either.
            self._group = None
            self._torch_comm.release()


def _squares_for(spec: Reducer, module: torch.nn.Module) -> SquaredGradients | None:
    """Hooks that gather what the spec wants to know about single samples, if it does."""
    wanted = {part.squares for part in spec.walk() if isinstance(part, Reducer)} - {None}
    if not wanted:
        return None
    if len(wanted) > 1:
        raise ValueError(f"{spec!r} asks for squares over {' and over '.join(sorted(map(str, wanted)))}. Choose one.")
    return PerSample(module) if wanted == {"samples"} else PerBackward(module)


def _numbers(state: State, key: str) -> Iterator[Any]:
    """Everything that is called ``key`` in a state and the states inside it."""
    for name, value in state.items():
        if name == key:
            yield value
        elif isinstance(value, dict):
            yield from _numbers(value, key)


def _residual_norm(entries: list[State]) -> float:
    norms = [float(residual.norm()) for state in entries for residual in _numbers(state, "residual")]
    return math.hypot(*norms)


def _fail(error: Exception) -> NoReturn:
    raise error


def _unwrap(future: torch.futures.Future[Any]) -> Tensor:
    """Futures lose an exception's type and text when it is set on them, but keep what is raised here."""
    buffer, error = future.value()
    if error is not None:
        raise error
    result: Tensor = buffer
    return result


def _warm_up(spec: Reducer) -> None:
    """Runs the spec once on a small vector, so that kernels are compiled here and not in the first training step."""
    bucket = Bucket(("weight", "bias"), ((64, 64), (64,)))
    x = torch.linspace(-1.0, 1.0, bucket.numel)
    bucket.lr, bucket.squares = 1.0, x.square()

    def work(comm: Comm) -> None:
        spec.reduce(bucket, x, torch.empty_like(x), spec.init(bucket, comm), comm)

    local.run(1, work)


def _some(names: list[str], at_most: int = 5) -> str:
    return ", ".join(names[:at_most]) + (f" and {len(names) - at_most} more" if len(names) > at_most else "")
