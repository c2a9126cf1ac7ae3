"""Factories for simulations: the user's own, and the lab's workloads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tersegrad.hosts import Training
from tersegrad.lab import workloads
from tersegrad.lab.methods import Method
from tersegrad.lab.workloads import Workload
from tersegrad.plan.model import import_factory

Factory = Callable[..., Training]


def find(model: str | None, workload: str | None, data: Path | None, **own: Any) -> Factory:
    """The factory of ``--model module:factory`` or of ``--workload name``."""
    if (model is None) == (workload is None):
        raise ValueError("say what is trained: --model my_module:factory, or one of the lab's with --workload fashion.")
    if model is not None:
        if given := [name for name in ("data", *own) if {**own, "data": data}[name] is not None]:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"{flags} cannot change a model of your own: the factory of --model {model} decides it.")
        return import_factory(model)
    assert workload is not None
    return of_workload(replace(workloads.find(workload), **{k: v for k, v in own.items() if v is not None}), data)


def of_workload(workload: Workload, folder: Path | None) -> Factory:
    """A factory that trains a workload as ``tersegrad train`` does."""
    data = workload.load(folder)

    def factory(seed: int, workers: int, steps: int, spec: str) -> Training:
        adapted = Method(spec).adapt(workload)
        adapted.steps(data, workers)  # too few data for so many workers are refused now
        model = adapted.model(seed)
        optimizer = adapted.optimizer(model)
        return Training(
            model,
            optimizer,
            lambda worker, workers, epoch: adapted.batches(data, epoch, worker, workers, seed),
            adapted.loss,
            lambda trained: adapted.evaluate(trained, data),
            metric=adapted.metric,
            schedule=adapted.schedule(optimizer, steps),
            max_norm=adapted.max_norm,
            carries=True,
            batch=adapted.batch,
        )

    return factory
