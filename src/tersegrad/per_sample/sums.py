"""Storage of the sums of squares, and the simplest way to fill it: every backward pass counts as one sample."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tersegrad.core.memory_format import shaped


class SquaredGradients(ABC):
    """Per trainable parameter, per element: the sum over samples of (that sample's share of the gradient)^2.

    The sums are float32 whatever the parameters are, and grow until they are cleared. They are filled by hooks, in the
    thread that runs backward, and are complete for a parameter before DDP is notified that its gradient is ready.
    """

    def __init__(self, module: nn.Module):
        self._parameters = {id(p): (name, p) for name, p in module.named_parameters() if p.requires_grad}
        self._sums = {
            key: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for key, (_, p) in self._parameters.items()
        }
        self._lock = threading.RLock()
        self._handles: list[RemovableHandle] = []
        self._watch(module)

    @abstractmethod
    def _watch(self, module: nn.Module) -> None:
        """Install the hooks, and put their handles into ``_handles``."""

    def of(self, parameter: Tensor) -> Tensor:
        """The sums of one parameter, in its shape."""
        if id(parameter) not in self._sums:
            raise ValueError(
                f"There are no sums for this parameter of shape {tuple(parameter.shape)}: it is not in the module, or "
                f"was frozen when this {type(self).__name__} was made. Make a new one after unfreezing."
            )
        return self._sums[id(parameter)]

    def place(self, parameters: Sequence[Tensor], flat: Tensor) -> None:
        """Move the sums of these parameters into ``flat``, concatenated; they stay there from now on."""
        numel = sum(p.numel() for p in parameters)
        if flat.dtype != torch.float32 or flat.shape != (numel,) or not flat.is_contiguous():
            raise ValueError(
                f"The sums of these {len(parameters)} parameters need a contiguous vector of {numel} float32, and this "
                f"is {flat.dtype} of shape {tuple(flat.shape)}."
            )
        with self._lock, torch.no_grad():
            before = [self.of(p).clone() for p in parameters]  # they may overlap ``flat``
            slices = flat.split([p.numel() for p in parameters])
            for p, part, sums in zip(parameters, slices, before, strict=True):
                self._sums[id(p)] = shaped(part, p).copy_(sums)

    def clear(self) -> None:
        """Set all sums to zero; call it between backward passes."""
        with self._lock, torch.no_grad():
            for sums in self._sums.values():
                sums.zero_()

    def close(self) -> None:
        """Remove all hooks; the sums stay readable."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class PerBackward(SquaredGradients):
    """Every backward pass counts as one sample: squares of whole micro-batch gradients, for any model.

    With gradient accumulation (DDP's ``no_sync``) each micro-batch is one sample.
    """

    def _watch(self, module: nn.Module) -> None:
        for key, (_, p) in self._parameters.items():
            # A hook on the leaf sees the gradient of this backward pass alone, all uses summed, before it is added.
            self._handles.append(p.register_hook(lambda gradient, key=key: self._add(key, gradient)))

    def _add(self, key: int, gradient: Tensor) -> None:
        with self._lock, torch.no_grad():
            add_whole(self._sums[key], gradient, self._parameters[key][0])


def add_whole(sums: Tensor, gradient: Tensor, name: str) -> None:
    """Add the squares of a whole backward pass's gradient; ValueError if that is sparse."""
    if gradient.is_sparse:
        raise ValueError(f"The gradient of {name} is sparse. Make its embedding with sparse=False.")
    gradient = gradient.detach().float()
    sums.addcmul_(gradient, gradient)
