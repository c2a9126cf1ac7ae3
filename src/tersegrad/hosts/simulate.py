"""Simulation: the host for N virtual workers in one process. One model, and as many engines as there are workers.

In every step the gradient of each worker is computed in turn on the same weights, and handed to that worker's own
engine; the engines exchange frames in memory, each on its own thread, and the optimizer steps once on the mean. Buckets
and sums are those of DistributedDataParallel over gloo, so weights are the same to the bit.
"""

import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tersegrad.auto import Auto
from tersegrad.comm.torch import NetworkError
from tersegrad.comm.virtual import Hub
from tersegrad.core import Reducer, Spec, needs_of
from tersegrad.engine import Engine, Options
from tersegrad.hosts import _buckets, _checks
from tersegrad.hosts._forked import GradientProcess, GradientServer
from tersegrad.hosts._randomness import undisturbed
from tersegrad.hosts._squares import squares_for
from tersegrad.hosts._virtual import (
    FlatGradients,
    LocalGradient,
    VirtualPeers,
    VirtualWorker,
    copy_all,
    tensors_of,
    worker_seed,
)
from tersegrad.hosts.parameter_shift import ParameterShift, move
from tersegrad.hosts.training import Training
from tersegrad.specs import parse_reducer

FORMAT = 2  # of state_dict
COMPARE_EVERY = 50  # steps: every worker decodes all by itself, and all must hold the same mean, to the bit
_TOTALS = ("bytes_sent", "bytes_handed_over", "dense_bytes", "nonfinite_steps")

DecisionLog = Sequence[Mapping[str, Any]]

__all__ = ["Simulation", "evaluated", "require_decisions", "worker_seed"]


class Simulation:
    """N workers in one process, with the weights of N processes to the bit.

    Args:
        training: What is trained.
        spec: A preset, an expression or a reducer object.
        workers: How many.
        seed: Of the workers' generators (see ``worker_seed``).
        method_seed: Feeds all randomness of the method, as ``attach(..., seed=)``.
        nonfinite: As in ``attach``.
        broadcast_buffers: As in DistributedDataParallel: before each step every worker takes the module buffers of
            worker 0, such as the statistics of BatchNorm. False: each worker keeps its own.
        bucket_cap_mb: As in DistributedDataParallel. Larger than the model: one vector of all gradients.
        decisions: For ``auto``: ``handle.metrics()["decisions"]`` of a real run, which it follows.
        processes: Gradients are computed in so many processes, forked from this one, on the same weights. More than
            one needs ``torch.set_num_threads(1)``, and no other threads at work here.

    Raises:
        ValueError: The spec cannot work with this training.

    Example:
        >>> simulation = tersegrad.Simulation(training, "topk4", workers=16)  # doctest: +SKIP
        >>> losses = [simulation.step() for _ in range(2000)]  # doctest: +SKIP
    """

    def __init__(
        self,
        training: Training,
        spec: str | Spec,
        workers: int,
        *,
        seed: int = 0,
        method_seed: int = 0,
        nonfinite: str = "propagate",
        broadcast_buffers: bool = True,
        bucket_cap_mb: int | None = None,
        decisions: DecisionLog | None = None,
        processes: int = 1,
    ):
        if type(workers) is not int or workers < 1:
            raise ValueError(f"workers={workers!r}: how many workers are simulated, a whole number from 1.")
        self.spec = parse_reducer(spec)
        if type(processes) is not int or processes < 1:
            raise ValueError(f"processes={processes!r}: how many compute gradients, a whole number from 1.")
        if processes > 1 and torch.get_num_threads() > 1:
            raise ValueError(
                f"processes={processes} with {torch.get_num_threads()} threads: a forked process cannot use torch's "
                "threads. Call torch.set_num_threads(1) first, or leave processes at 1."
            )
        require_decisions(self.spec, decisions)
        _checks.require_optimizer(self.spec, training.optimizer)
        _checks.warn_if_nothing_is_compressed(self.spec, training.model)
        self.training = training
        self.workers = workers
        self._bucket_cap_mb = bucket_cap_mb
        self.steps = 0
        self.waiting: float | None = None  # share of the gradient's energy in residuals, when it was last weighed
        self._totals, self._most = dict.fromkeys(_TOTALS, 0), 0  # of all workers and of the busiest, before a load
        self._parameters = training.trained
        self._module_buffers = list(training.model.buffers())
        self._turn = 0  # whose gradient is computed
        self._squares = squares_for(self.spec, training.model)
        self._homes = {name: p.data for name, p in self._parameters.items()}
        gradients = {rank: LocalGradient(rank, workers, seed, training) for rank in range(workers)}
        if not broadcast_buffers:
            for local in gradients.values():
                local.module_buffers = [buffer.clone() for buffer in self._module_buffers]
        self._processes = self._fork(gradients, min(processes, workers))
        elsewhere = {rank for process in self._processes for rank in process.ranks}
        self._gradients_here = {rank: local for rank, local in gradients.items() if rank not in elsewhere}
        self._hub = Hub(workers)
        options = Options(seed=method_seed, optimizer=training.optimizer, nonfinite=nonfinite)
        self._shift = self._shift_for(options)
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        self._workers = [
            VirtualWorker(Engine(self.spec, shapes, options, VirtualPeers(self._hub, rank, decisions), dict))
            for rank in range(workers)
        ]
        self._place(_buckets.first_buckets(list(self._parameters.items())))

    def _fork(self, gradients: dict[int, LocalGradient], processes: int) -> list[GradientProcess]:
        """All but one of the processes that compute gradients; worker 0's is computed here."""
        found: list[GradientProcess] = []
        if processes > 1:
            for home in self._homes.values():
                home.share_memory_()  # the optimizer writes there
        for place in range(1, processes):
            theirs = {rank: local for rank, local in gradients.items() if rank % processes == place}
            shifts = bool(needs_of(self.spec).lookahead)
            server = GradientServer(theirs, self._parameters, self._module_buffers, self._squares, shifts)
            found.append(GradientProcess(server, found))
        return found

    def _shift_for(self, options: Options) -> ParameterShift | None:
        lookahead = needs_of(self.spec).lookahead
        if not lookahead:
            return None
        return ParameterShift(
            self.training.optimizer, lookahead, lambda: self._residuals(self._workers[self._turn]), options.scale
        )

    def _residuals(self, worker: VirtualWorker) -> list[tuple[Tensor, Tensor]]:
        return [(self._parameters[name], residual) for name, residual in worker.engine.residuals()]

    def _place(self, buckets: list[tuple[str, ...]]) -> None:
        self._buckets = buckets
        flat = FlatGradients(buckets, self._parameters, self._squares)
        for rank in self._gradients_here:
            self._workers[rank].place(flat)
        for process in self._processes:
            process.place(buckets, flat, self._workers)

    # ---- one step --------------------------------------------------------------------------------

    def step(self, weigh: bool = False) -> float:
        """One step of all workers: their gradients, the mean, the optimizer.

        Args:
            weigh: Also find the share of the gradient's energy that waits in residuals after the step (``waiting``).

        Returns:
            The mean of the workers' losses.
        """
        step = _Step(self.workers, weigh)
        self._hub.compares = self.steps % COMPARE_EVERY == 0
        try:
            with undisturbed():
                self._gradients(step)
            self._wait(step.answers)
        except BaseException as error:
            self._hub.abort(f"the step was not finished: {type(error).__name__}: {error}")
            raise
        self._update()
        if weigh:
            self.waiting = self._share_waiting(sum(step.energies))
        if self.steps == 0:
            ready = [(name, self._parameters[name]) for name in step.ready]
            limits = None if self._bucket_cap_mb is None else [self._bucket_cap_mb << 20]
            self._place(_buckets.rebuilt_buckets(ready, limits))
        self.steps += 1
        return sum(step.losses) / len(step.losses)

    def _gradients(self, step: "_Step") -> None:
        """Every worker's gradient is computed, here or in another process, and handed to its engine."""
        for process in self._processes:
            process.take_module_buffers(self._module_buffers)
        with ThreadPoolExecutor(max(1, len(self._processes))) as threads:  # started only if it is given work
            others = [threads.submit(self._gradients_of, process, step) for process in self._processes]
            self._gradients_of_own(step)
            for other in others:
                other.result()
        self._require_equal_epochs(step.lengths)

    def _gradients_of_own(self, step: "_Step") -> None:
        """Of the workers whose gradients are computed in this process, worker 0 first."""
        before = after = [buffer.clone() for buffer in self._module_buffers]  # worker 0's
        for rank, local in self._gradients_here.items():
            self._turn = rank
            noting = self._note_order(step.ready) if self.steps == 0 and rank == 0 else []
            step.losses[rank] = self._gradient(local, before)
            step.lengths[rank] = local.stream.lengths
            for note in noting:
                note.remove()
            if rank == 0 and not local.module_buffers:
                after = [buffer.clone() for buffer in self._module_buffers]
            self._workers[rank].take()
            self._hand_over(rank, step)
        copy_all(self._module_buffers, self._gradients_here[0].module_buffers or after)

    def _gradient(self, local: LocalGradient, before: list[Tensor]) -> float:
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._shift is None:
            return local.backward(self._module_buffers, before)
        self._shift.shift()
        try:
            return local.backward(self._module_buffers, before)
        finally:
            self._shift.restore()

    def _gradients_of(self, process: GradientProcess, step: "_Step") -> None:
        """On a thread of its own: of the workers whose gradients a forked process computes."""
        for rank in process.ranks:
            step.losses[rank], step.lengths[rank] = process.gradient(rank, self._shifts(self._workers[rank]))
            self._hand_over(rank, step)

    def _shifts(self, worker: VirtualWorker) -> Iterator[tuple[str, Callable[[Tensor], None]]]:
        """Which parameters are shifted for a worker, and what writes them; their own storage is in ``_homes``."""
        if self._shift is not None:
            names = {id(parameter): name for name, parameter in self._parameters.items()}
            for parameter, residual, rate in self._shift.moves(self._residuals(worker)):
                name = names[id(parameter)]
                yield name, partial(move, self._homes[name], residual, rate)

    def _hand_over(self, rank: int, step: "_Step") -> None:
        if step.weigh:
            step.energies[rank] = self._workers[rank].energy()
        self._workers[rank].submit(step.answers.put)

    def _note_order(self, ready: list[str]) -> list[RemovableHandle]:
        """Hooks that note in which order gradients come, as DDP does in its first step."""

        def noter(name: str) -> Callable[[Tensor], None]:
            def note(_: Tensor) -> None:
                if name in ready:
                    ready.remove(name)  # the last of several passes counts
                ready.append(name)

            return note

        items = self._parameters.items()
        return [parameter.register_post_accumulate_grad_hook(noter(name)) for name, parameter in items]

    def _require_equal_epochs(self, lengths: list[list[int]]) -> None:
        for rank, found in enumerate(lengths):
            if found != lengths[0]:
                raise ValueError(
                    f"worker {rank} had {found[-1:] or 'more'} batches in the epoch, and worker 0 "
                    f"{lengths[0][-1:] or 'more'}: batches(worker, workers, epoch) must give all the same number."
                )

    def _wait(self, answers: "queue.SimpleQueue[BaseException | None]") -> None:
        """Until all engines are done. All of them must hold the same mean."""
        told = [answers.get() for _ in range(self.workers * len(self._buckets))]
        errors = [error for error in told if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, NetworkError)), errors[0])
        if self._hub.compares:
            for rank, worker in enumerate(self._workers):
                if not all(map(_same_bits, self._workers[0].buckets, worker.buckets)):
                    raise RuntimeError(f"step {self.steps}: worker {rank} holds another mean than worker 0.")

    def _update(self) -> None:
        """The optimizer steps once, on the mean."""
        for name, mean in self._workers[0].gradients.items():
            self._parameters[name].grad = mean
        if self._shift is not None:
            self._shift.look()
        if self.training.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.training.max_norm)
        if self._shift is not None:
            self._shift.before_step()
        self.training.optimizer.step()
        if self.training.schedule is not None:
            self.training.schedule.step()

    def _share_waiting(self, energy: float) -> float:
        """What is left in residuals of all that could have been sent in this step."""
        left = sum(worker.engine.metrics(norms=True)["residual_norm"] ** 2 for worker in self._workers)
        return left / energy if energy > 0 else 0.0

    # ---- between two steps -----------------------------------------------------------------------

    @property
    def epochs(self) -> float | None:
        """Passes over the data so far; None in the first one, whose length is not known."""
        stream = self._gradients_here[0].stream
        return stream.epoch + stream.done / stream.lengths[-1] if stream.lengths else None

    def evaluate(self) -> float:
        """The score of the model as it is, on worker 0."""
        return evaluated(self.training)

    def metrics(self, norms: bool = False) -> dict[str, Any]:
        """What ``Handle.metrics`` says, as a mean over workers; ``bytes_sent_most`` is that of the busiest."""
        own = [worker.engine.metrics(norms) for worker in self._workers]
        told = {key: own[0][key] for key in ("spec", "buckets", "layers", "decisions")}
        for key in (*_TOTALS, "density", "empty_sends"):
            told[key] = (self._totals.get(key, 0) + sum(one[key] for one in own)) / len(own)
        told["bytes_sent_most"] = self._most + max(one["bytes_sent"] for one in own)
        told["ratio"] = told["dense_bytes"] / told["bytes_sent"] if told["bytes_sent"] else 1.0
        if norms:
            told["residual_norm"] = math.sqrt(sum(one["residual_norm"] ** 2 for one in own) / len(own))
        return {"steps": self.steps, **told}

    def state_dict(self) -> dict[str, Any]:
        """All that decides how the simulation goes on, to the bit. Tensors are the running ones: save them at once."""
        training, own = self.training, [worker.engine.metrics(norms=False) for worker in self._workers]
        return {
            "format": FORMAT,
            "spec": repr(self.spec),
            "steps": self.steps,
            "model": {name: value.detach() for name, value in tensors_of(training.model).items()},
            "optimizer": training.optimizer.state_dict(),
            "schedule": None if training.schedule is None else training.schedule.state_dict(),
            "share": None if self._shift is None else self._shift.share,
            "buckets": self._buckets,
            "totals": {key: total + sum(one[key] for one in own) for key, total in self._totals.items()},
            "most": self._most + max(one["bytes_sent"] for one in own),
            "engines": [worker.engine.state_dict() for worker in self._workers],
            "gradients": self._gradients_saved(),
        }

    def _gradients_saved(self) -> list[dict[str, Any]]:
        found = {rank: local.state_dict() for rank, local in self._gradients_here.items()}
        found |= {rank: process.state_dict(rank) for process in self._processes for rank in process.ranks}
        return [found[rank] for rank in range(self.workers)]

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Goes on where ``state_dict`` was called, to the bit."""
        told = saved.get("format"), saved.get("spec"), len(saved.get("engines", ()))
        mine = FORMAT, repr(self.spec), self.workers
        if told != mine:
            raise ValueError(
                f"this is a simulation of format, spec and workers {told}, and this one is {mine}. Begin a new run."
            )
        training = self.training
        with torch.no_grad():
            for name, value in tensors_of(training.model).items():
                value.copy_(saved["model"][name])
        training.optimizer.load_state_dict(saved["optimizer"])
        if training.schedule is not None:
            training.schedule.load_state_dict(saved["schedule"])
        if self._shift is not None:
            self._shift.share = saved["share"]
        self.steps, self._totals, self._most = saved["steps"], dict(saved["totals"]), saved["most"]
        self._place([tuple(names) for names in saved["buckets"]])
        for worker, one in zip(self._workers, saved["engines"], strict=True):
            worker.engine.load_state_dict(one, strict=True, same_buckets=True)
        for rank, local in self._gradients_here.items():
            local.load_state_dict(saved["gradients"][rank])
        for process in self._processes:
            for rank in process.ranks:
                process.load_state_dict(rank, saved["gradients"][rank])

    def close(self) -> None:
        """Ends the workers' threads and the other processes. Harmless twice."""
        for process in self._processes:
            process.close()
        for worker in self._workers:
            worker.engine.close()
        if self._squares is not None:
            self._squares.close()


class _Step:
    """What is gathered in one step, by rank."""

    def __init__(self, workers: int, weigh: bool):
        self.weigh = weigh
        self.losses = [0.0] * workers
        self.energies = [0.0] * workers
        self.lengths: list[list[int]] = [[] for _ in range(workers)]  # of every worker's epochs so far
        self.ready: list[str] = []  # in which order gradients came
        self.answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()


def evaluated(training: Training) -> float:
    """The score of a model as it is, in evaluation mode; ``ValueError`` if that changes the model."""
    if training.evaluate is None:
        raise ValueError("this Training has no evaluate function.")
    before = {name: value.detach().clone() for name, value in tensors_of(training.model).items()}
    modes = [(module, module.training) for module in training.model.modules()]
    training.model.eval()
    try:
        with torch.no_grad(), undisturbed():
            score = training.evaluate(training.model)
    finally:
        for module, mode in modes:
            module.training = mode
    for name, value in tensors_of(training.model).items():
        if name not in before or not _same_bits(before[name], value):
            raise ValueError(
                f"evaluate(model) has changed {name} of the model. A real run evaluates on one worker alone, whose "
                "model would then differ from the others. Evaluate a copy of the model, or do not write to it."
            )
    try:
        return float(score)
    except (TypeError, ValueError):
        raise TypeError(f"evaluate(model) gave {score!r}. It must return one number, the {training.metric}.") from None


def require_decisions(spec: Reducer, decisions: DecisionLog | None) -> None:
    """``auto`` needs the log of a real run."""
    if decisions is None and any(isinstance(part, Auto) for part in spec.walk()):
        raise ValueError(
            f"{spec!r} chooses by the time that its steps take, and a simulation has no network to wait for. Give the "
            'decisions of a real run, handle.metrics()["decisions"], or simulate the method that it chose.'
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
