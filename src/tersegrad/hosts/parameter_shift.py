"""Evaluate gradients at shifted weights (StepAhead).

During forward and backward each parameter's storage is swapped for ``w - by * lr * residual``; the original storage
is swapped back when backward ends, the same bits as before. Where a forward has no backward, or one under
``no_sync``, it is swapped back before the optimizer steps, before the model is saved, and before a forward of another
kind.

The residual would not always move the weights by (learning rate) * residual: where the user clips or unscales what
backward has left in ``.grad``, only a share of it reaches the optimizer. That share is measured on a few thousand
elements.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tersegrad import kernels
from tersegrad.core.memory_format import flat, shaped
from tersegrad.hosts._copies import Hook

SAMPLE = 4096  # elements of the gradient that are looked at, about

Residuals = Iterable[tuple[Tensor, Tensor]]  # a parameter, and its slice of the residual


class ParameterShift:
    """Shifts a model's parameters by -``by`` * (learning rate) * residual, and restores them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        by: float,
        residuals: Callable[[], Residuals],
        scale: Callable[[], float],
    ):
        self._optimizer = optimizer
        self._by = by
        self._residuals = residuals
        self._scale = scale
        self.share = 1.0  # of a gradient: what was left of the last one when the optimizer got it
        self._seen: tuple[list[Tensor], int, float] = [], 1, 0.0  # whose gradients, how many of them, and their norm
        self._original: dict[int, tuple[Tensor, Tensor]] = {}  # shifted parameters and their own storage, by id
        self._shifted: dict[int, Tensor] = {}  # the tensors that take their places
        self._handles: list[RemovableHandle] = []

    def watch(self, model: DistributedDataParallel) -> None:
        """Shifts in every training forward of this model, and restores in time."""
        self._handles = [
            model.register_forward_pre_hook(Hook(self._before_forward)),
            model.module.register_state_dict_pre_hook(Hook(lambda *_: self.restore())),
            self._optimizer.register_step_pre_hook(Hook(lambda *_: self.before_step())),
        ]

    def _before_forward(self, model: torch.nn.Module, _: object) -> None:
        if model.training and torch.is_grad_enabled():
            self.shift()
        else:
            self.restore()

    def shift(self) -> None:
        """Swaps in the shifted weights; no-op if already shifted: several forwards may share a backward."""
        if self._original:
            return
        moves = self.moves(self._residuals())
        self._original = {id(p): (p, p.data) for p, _, _ in moves}
        for parameter, residual, rate in moves:
            key, home = id(parameter), parameter.data
            there = self._shifted[key] = self._shifted[key] if key in self._shifted else torch.empty_like(home)
            move(home, residual, rate, there)
            parameter.data = there

    def moves(self, residuals: Residuals) -> list[tuple[Tensor, Tensor, float]]:
        """The parameters that are shifted, their residuals, and how far one unit of a residual moves them."""
        rates = {id(p): self._rate(group) for group in self._optimizer.param_groups for p in group["params"]}
        return [(p, residual, rate) for p, residual in residuals if (rate := rates.get(id(p)))]

    def _rate(self, group: dict[str, float]) -> float:
        """How far one unit of the residual would move the parameters of a group."""
        return self._by * self.share * float(group["lr"]) * (1.0 if group.get("maximize") else -1.0)

    def restore(self) -> None:
        """Swaps the original weights back in."""
        for parameter, home in self._original.values():
            parameter.data = home
        self._original = {}

    def restore_after_backward(self) -> None:
        """Called in backward: restores the weights when all of it is done."""
        _when_backward_ends(self.restore)
        when_backward_has_ended(self.look)

    def look(self) -> None:
        """The norm of the mean as backward leaves it."""
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        every = 1 + sum(p.numel() for p in trained) // SAMPLE
        self._seen = trained, every, _norm(trained, every) / self._scale()

    def before_step(self) -> None:
        """What the user has left of that norm."""
        self.restore()
        trained, every, norm = self._seen
        self._seen = [], 1, 0.0
        if norm and all(p.grad is not None for p in trained):  # else nothing was sent of these elements
            share = _norm(trained, every) / norm
            self.share = share if math.isfinite(share) else self.share

    def unshifted(self, parameter: Tensor) -> Tensor:
        """The original weights of a parameter; any thread may ask."""
        return self._original.get(id(parameter), (parameter, parameter.data))[1]

    def close(self) -> None:
        """Restores the weights and removes all hooks."""
        self.restore()
        for handle in self._handles:
            handle.remove()


def move(home: Tensor, residual: Tensor, rate: float, there: Tensor) -> None:
    """``there = home + rate * residual``. As vectors where that is possible: this is a pass over all weights."""
    flat_home, flat_there = flat(home), flat(there)
    if flat_home is None or flat_there is None or home.dtype != torch.float32:
        torch.add(home, shaped(residual, home), alpha=rate, out=there)
    else:
        kernels.on(home).add_scaled(flat_home, residual, rate, flat_there)


def _when_backward_ends(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_a_backward() -> bool:
    """Whether autograd is at work on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def when_backward_has_ended(function: Callable[[], None]) -> None:
    """Called in backward: calls a function after DDP, which has something to do at the end, too: it fills ``.grad``."""
    _when_backward_ends(lambda: _when_backward_ends(function))


def _norm(parameters: list[Tensor], every: int) -> float:
    """Of every so-many-th element of their gradients, as they lie in memory."""
    gradients = (p.grad for p in parameters if p.grad is not None)
    return float(torch.cat([g.as_strided((-(-g.numel() // every),), (every,)) for g in gradients]).norm())
