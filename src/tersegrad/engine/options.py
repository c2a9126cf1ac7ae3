"""What a host was told about one run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tersegrad.core import Comm

NONFINITE = ("propagate", "skip", "raise")


@dataclass(frozen=True)
class Options:
    """See ``tersegrad.attach``."""

    network: Callable[[Comm], Comm] | None = None
    seed: int = 0
    timeout: float = 300.0
    group: dist.ProcessGroup | None = None
    optimizer: torch.optim.Optimizer | None = None
    scaler: torch.amp.GradScaler | None = None
    nonfinite: str = "propagate"
    check_replicas: int | None = None

    def __post_init__(self) -> None:
        if self.nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={self.nonfinite!r}: write one of {', '.join(map(repr, NONFINITE))}.")
        every = self.check_replicas
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"check_replicas={every!r}: write a number of steps, e.g. 100, or None for never.")
        if self.timeout <= 0:
            raise ValueError(
                f"timeout={self.timeout!r}: give the seconds to wait for another worker, e.g. timeout=300."
            )

    def facts(self) -> dict[str, object]:
        """What must be the same on all workers, by its name in ``attach``."""
        return {
            "seed": self.seed,
            "nonfinite": self.nonfinite,
            "scaler": "none" if self.scaler is None else "given",
            "check_replicas": self.check_replicas,
        }

    def lr(self) -> float | None:
        """The learning rate now, where it is known: the highest of the optimizer's groups."""
        return None if self.optimizer is None else max(float(g["lr"]) for g in self.optimizer.param_groups)

    def scale(self) -> float:
        """What the loss of this step was multiplied by."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())
