"""Gradient: one bucket that a host has handed over."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Done = Callable[[BaseException | None], None]


@dataclass(frozen=True)
class Gradient:
    """One bucket of one step, and what was known when the host handed it over.

    Args:
        names: Of the tensors in it, in order.
        buffer: The flat gradient; it becomes the mean over workers.
        done: Called once, from any thread, when ``buffer`` holds the mean, or with the error.
        squares: The sum over samples of squared gradients, where the spec needs it; zeroed when it was used.
        lr: The learning rate, where it is known.
        scale: What the loss was multiplied by.
        step: The number of the step; set by the engine.
    """

    names: tuple[str, ...]
    buffer: Tensor
    done: Done
    squares: Tensor | None = None
    lr: float | None = None
    scale: float = 1.0
    step: int = 0
