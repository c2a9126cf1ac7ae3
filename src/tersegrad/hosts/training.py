"""Training: what a simulation trains. A factory makes one; the lab's workloads are such factories."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

KNOWN_METRICS = {"accuracy": True, "perplexity": False, "loss": False}  # is higher better?

Batches = Callable[[int, int, int], Iterable[Any]]


@dataclass
class Training:
    """A model, its optimizer, every worker's batches, and a score.

    Args:
        model: Its parameters are on the CPU.
        optimizer: Holds the model's trainable parameters; it steps once a step, on the mean gradient.
        batches: ``batches(worker, workers, epoch)`` gives one worker's batches of one epoch, for example a DataLoader
            with a DistributedSampler. It must give the same batches when it is called again, so that a run can be
            resumed. An epoch ends for all workers with the first one that has no more batches.
        loss: ``loss(model, batch)`` gives the loss to call ``backward`` on, a mean over the batch.
        evaluate: ``evaluate(model)`` gives the score; called in evaluation mode, without gradients.
        metric: The score's name, for reports and ``until``.
        higher_is_better: Known for accuracy, perplexity and loss.
        schedule: Of the learning rate; stepped after each step.
        max_norm: The mean gradient is clipped to this norm.
        accumulate: Batches of each worker in a step; the loss of each is divided by their number.
        carries: ``loss(model, batch, carried)`` gives a pair instead: the loss, and what the same worker carries to its
            next batch, detached. It is None in the beginning of an epoch.
        batch: Samples of one worker in a step; for the report only.
    """

    model: nn.Module
    optimizer: Optimizer
    batches: Batches
    loss: Callable[..., Any]
    evaluate: Callable[[nn.Module], float] | None = None
    metric: str = "accuracy"
    higher_is_better: bool | None = None
    schedule: LRScheduler | None = None
    max_norm: float | None = None
    accumulate: int = 1
    carries: bool = False
    batch: int | None = None

    def __post_init__(self) -> None:
        _require(self.model, nn.Module, "model", "a torch.nn.Module")
        _require(self.optimizer, Optimizer, "optimizer", "a torch.optim.Optimizer made of model.parameters()")
        for name, call in (("batches", "batches(worker, workers, epoch)"), ("loss", "loss(model, batch)")):
            if not callable(getattr(self, name)):
                raise TypeError(f"Training({name}={getattr(self, name)!r}): write a function, called as {call}.")
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ValueError(f"Training(accumulate={self.accumulate!r}): batches in a step, a whole number from 1.")
        if self.higher_is_better is None:
            if self.metric not in KNOWN_METRICS:
                raise ValueError(
                    f"Training(metric={self.metric!r}): say whether more of it is better: higher_is_better=True or "
                    f"False. It is known for {', '.join(KNOWN_METRICS)}."
                )
            self.higher_is_better = KNOWN_METRICS[self.metric]
        _require_parameters(self.model)
        _require_held(self.model, self.optimizer)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that have gradients, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


def make(factory: Callable[..., Any], **known: Any) -> Training:
    """Calls a factory with those of ``known`` (seed, workers, steps, spec) that it has parameters for.

    torch's global generator is seeded before, so that a factory that takes no seed follows it too.
    """
    name = getattr(factory, "__name__", repr(factory))
    if not callable(factory):
        raise TypeError(f"the factory is {factory!r}: write a function that returns a tersegrad.Training.")
    parameters = inspect.signature(factory).parameters.values()
    asked = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [p.name for p in parameters if p.default is p.empty and p.name in asked and p.name not in known]
    if unknown:
        raise TypeError(
            f"{name}() wants {', '.join(unknown)}, and a factory can be given {', '.join(known)}. Give it a default."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(known["seed"])
        made = factory(**{key: value for key, value in known.items() if key in asked})
    if not isinstance(made, Training):
        raise TypeError(
            f"{name}() gave a {type(made).__name__}. It must return "
            "tersegrad.Training(model, optimizer, batches=..., loss=..., evaluate=...)."
        )
    return made


def _require(value: Any, kind: type, name: str, instead: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"Training({name}=...) is a {type(value).__name__}: give {instead}.")


def _require_parameters(model: nn.Module) -> None:
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(
            f"parameter {lazy[0]} of the model has no shape yet (a lazy module). Run one batch through the model in "
            "the factory, before the optimizer is made."
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model has requires_grad=True: there is nothing to train.")
    elsewhere = sorted({p.device.type for p in trained} - {"cpu"})
    if elsewhere:
        raise ValueError(f"the model's parameters are on {', '.join(elsewhere)}: a simulation runs on the CPU.")


def _require_held(model: nn.Module, optimizer: Optimizer) -> None:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = {id(p) for p in model.parameters()}
    if held - own:
        raise ValueError(
            f"the optimizer holds {len(held - own)} tensors that are not parameters of the model. Make it of this "
            "model's parameters, after the last change of them (a copy of a model has parameters of its own)."
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"the optimizer does not hold {missing[0]}"
            + (f" and {len(missing) - 1} more parameters" if len(missing) > 1 else "")
            + ", so they would never change. Give it model.parameters(), or set requires_grad=False for these."
        )
