"""Parameters that are elsewhere while gradients are taken: ahead by what this worker has not sent yet (``StepAhead``).

They leave when a training forward begins and are back when its backward ends, the same bits as before: a second
tensor takes their place meanwhile. Where a forward has no backward, or one under ``no_sync``, they are back before the
optimizer steps, before the model is saved, and before a forward of another kind.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tersegrad.layout import shaped

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
    ):
        self._optimizer = optimizer
        self._by = by
        self._waiting = waiting
        self._home: dict[int, tuple[Tensor, Tensor]] = {}  # where parameters that are away belong, by their id
        self._there: dict[int, Tensor] = {}  # the tensors that take their places
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._before_forward)),
            model.module.register_state_dict_pre_hook(_Hook(lambda *_: self.back())),
            optimizer.register_step_pre_hook(_Hook(lambda *_: self.back())),
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
            there = self._there.setdefault(id(parameter), torch.empty_like(home))
            parameter.data = torch.add(home, shaped(stretch, parameter), alpha=rates[id(parameter)], out=there)

    def _rate(self, group: dict[str, float]) -> float:
        """How far one unit of what waits would move the parameters of a group."""
        return self._by * float(group["lr"]) * (1.0 if group.get("maximize") else -1.0)

    def back(self) -> None:
        """If they are away."""
        for parameter, home in self._home.values():
            parameter.data = home
        self._home = {}

    def back_after_backward(self) -> None:
        """Called in backward: when all of it is done, they are back."""
        torch.autograd.Variable._execution_engine.queue_callback(self.back)

    def at_home(self, parameter: Tensor) -> Tensor:
        """What the parameter holds when it is not away; any thread may ask."""
        return self._home.get(id(parameter), (parameter, parameter.data))[1]

    def close(self) -> None:
        """They are back, and stay."""
        self.back()
        for handle in self._handles:
            handle.remove()
