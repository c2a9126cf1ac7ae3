"""Parameters that are elsewhere while gradients are taken: ahead by what this worker has not sent yet (``StepAhead``).

They leave when a training forward begins and are back when its backward ends, the same bits as before: a second
tensor takes their place meanwhile. Where a forward has no backward, or one under ``no_sync``, they are back before the
optimizer steps, before the model is saved, and before a forward of another kind.

What waits would not always move them by (learning rate) * gradient: where the user clips or unscales what backward has
left in ``.grad``, only a share of it reaches the optimizer. That share is measured on a few thousand elements.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tersegrad import kernels
from tersegrad.layout import flat, shaped

SAMPLE = 4096  # elements of the gradient that are looked at, about

Waiting = Iterable[tuple[Tensor, Tensor]]  # a parameter, and its stretch of what waits


class _Hook:
    """Calls a function. A copy of the model, by deepcopy or pickle, has hooks too, and those do nothing."""

    def __init__(self, function: Callable[..., None] | None = None):
        self._function = function

    def __call__(self, *args: object) -> None:
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


class Ahead:
    """Moves a model's parameters by -``by`` * (learning rate) * (what waits), and back."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        by: float,
        waiting: Callable[[], Waiting],
        scale: Callable[[], float],
    ):
        self._optimizer = optimizer
        self._by = by
        self._waiting = waiting
        self._scale = scale
        self.share = 1.0  # of a gradient: what was left of the last one when the optimizer got it
        self._seen: tuple[list[Tensor], int, float] = [], 1, 0.0  # whose gradients, how many of them, and their norm
        self._home: dict[int, tuple[Tensor, Tensor]] = {}  # where parameters that are away belong, by their id
        self._there: dict[int, Tensor] = {}  # the tensors that take their places
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._before_forward)),
            model.module.register_state_dict_pre_hook(_Hook(lambda *_: self.back())),
            optimizer.register_step_pre_hook(_Hook(lambda *_: self._before_step())),
        ]

    def _before_forward(self, model: torch.nn.Module, _: object) -> None:
        if model.training and torch.is_grad_enabled():
            self.go()
        else:
            self.back()

    def go(self) -> None:
        """Unless they are away already: several forwards may share a backward."""
        if self._home:
            return
        rates = {id(p): self._rate(group) for group in self._optimizer.param_groups for p in group["params"]}
        moves = [(p, p.data, stretch) for p, stretch in self._waiting() if rates.get(id(p))]
        self._home = {id(p): (p, home) for p, home, _ in moves}
        for parameter, home, stretch in moves:
            key = id(parameter)
            there = self._there[key] = self._there[key] if key in self._there else torch.empty_like(home)
            _move(home, stretch, rates[key], there)
            parameter.data = there

    def _rate(self, group: dict[str, float]) -> float:
        """How far one unit of what waits would move the parameters of a group."""
        return self._by * self.share * float(group["lr"]) * (1.0 if group.get("maximize") else -1.0)

    def back(self) -> None:
        """If they are away."""
        for parameter, home in self._home.values():
            parameter.data = home
        self._home = {}

    def back_after_backward(self) -> None:
        """Called in backward: when all of it is done, they are back."""
        _when_backward_ends(self._after_backward)

    def _after_backward(self) -> None:
        self.back()
        _when_backward_ends(self._look)  # only now: DDP, too, has something to do at the end, which fills ``.grad``

    def _look(self) -> None:
        """How the user gets the mean."""
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        every = 1 + sum(p.numel() for p in trained) // SAMPLE
        self._seen = trained, every, _norm(trained, every) / self._scale()

    def _before_step(self) -> None:
        """What the user has left of it."""
        self.back()
        trained, every, norm = self._seen
        self._seen = [], 1, 0.0
        if norm and all(p.grad is not None for p in trained):  # else nothing was sent of these elements
            share = _norm(trained, every) / norm
            self.share = share if math.isfinite(share) else self.share

    def at_home(self, parameter: Tensor) -> Tensor:
        """What the parameter holds when it is not away; any thread may ask."""
        return self._home.get(id(parameter), (parameter, parameter.data))[1]

    def close(self) -> None:
        """They are back, and stay."""
        self.back()
        for handle in self._handles:
            handle.remove()


def _move(home: Tensor, stretch: Tensor, rate: float, there: Tensor) -> None:
    """``there = home + rate * stretch``. As vectors where that is possible: this is a pass over all weights."""
    flat_home, flat_there = flat(home), flat(there)
    if flat_home is None or flat_there is None or home.dtype != torch.float32:
        torch.add(home, shaped(stretch, home), alpha=rate, out=there)
    else:
        kernels.on(home).add_scaled(flat_home, stretch, rate, flat_there)


def _when_backward_ends(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)


def _norm(parameters: list[Tensor], every: int) -> float:
    """Of every so-many-th element of their gradients, as they lie in memory."""
    gradients = (p.grad for p in parameters if p.grad is not None)
    return float(torch.cat([g.as_strided((-(-g.numel() // every),), (every,)) for g in gradients]).norm())
