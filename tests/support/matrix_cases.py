"""What runs inside the gloo worker processes of test_matrix.py: one spec under every option of DDP."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from support.ddp_cases import Net, digest, loss

STEPS = 4  # DDP makes its final buckets after the first step, or the second with a static graph


class Run:
    """One model, its optimizer and its handle."""

    def __init__(self, spec: str, scaler: torch.amp.GradScaler | None = None, **options: Any):
        torch.manual_seed(0)
        self.scaler = scaler
        group, ours = options.pop("groups", (None, None))
        self.model = DistributedDataParallel(Net(), process_group=group, **{"bucket_cap_mb": 0.05, **options})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.handle = tersegrad.attach(self.model, spec, optimizer=self.optimizer, scaler=scaler, group=ours)

    def step(self, number: int, **kwargs: Any) -> None:
        self.optimizer.zero_grad()
        loss(self.model, number, **kwargs).backward()
        self.optimizer.step()

    def result(self) -> str:
        """The digest of finite weights, to be compared between ranks."""
        self.handle.close()
        finite = all(bool(p.isfinite().all()) for p in self.model.parameters())
        return digest(self.model) if finite else "not finite"


def plain(spec: str, steps: int, **options: Any) -> str:
    run = Run(spec, **options)
    for step in range(steps):
        run.step(step)
    return run.result()


def static_graph(spec: str, steps: int) -> str:
    return plain(spec, steps, static_graph=True)


def bucket_view(spec: str, steps: int) -> str:
    return plain(spec, steps, gradient_as_bucket_view=True)


def unused(spec: str, steps: int) -> str:
    """A part that all ranks use in even steps only."""
    run = Run(spec, find_unused_parameters=True)
    for step in range(steps):
        run.step(step, use_extra=step % 2 == 0)
    return run.result()


def no_sync(spec: str, steps: int) -> str:
    run = Run(spec)
    for step in range(steps):
        run.optimizer.zero_grad()
        for micro in (0, 1):
            with contextlib.nullcontext() if micro else run.model.no_sync():
                loss(run.model, 100 * micro + step).backward()
        run.optimizer.step()
    return run.result()


def join(spec: str, steps: int) -> str:
    """Ranks have two batches more and less."""
    run = Run(spec)
    with run.model.join():
        for step in range(steps - 1 + dist.get_rank() % 3):
            run.step(step)
    return run.result()


def mixed_precision(spec: str, steps: int) -> str:
    """autocast, GradScaler with an overflow, clipping."""
    run = Run(spec, torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert run.scaler is not None
    for step in range(steps):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(run.model, step)
        if step == 1 and dist.get_rank() == 1:
            value = value * torch.inf
        run.scaler.scale(value).backward()
        run.scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.scaler.step(run.optimizer)
        run.scaler.update()
    assert run.scaler.get_scale() == 512.0, "one overflow halves the scale once, on all ranks"
    return run.result()


def subgroup(spec: str, steps: int, groups: Any = None) -> str:
    """The model lives on three of four ranks."""
    return "outside" if dist.get_rank() == 3 else plain(spec, steps, groups=groups)


OPTIONS: list[Callable[[str, int], str]] = [static_graph, bucket_view, unused, no_sync, join, mixed_precision]


def under_all_options(specs: dict[str, int]) -> dict[str, dict[str, str]]:
    """For every spec, with the steps that it needs to get into its phase, and every option: the digest of the weights.

    What went wrong, with its type, takes the place of a digest, and ends the run: ranks may be out of step then.
    """
    groups = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    found: dict[str, dict[str, str]] = {}
    for spec, steps in specs.items():
        found[spec] = {option.__name__: option(spec, steps) for option in OPTIONS}
        found[spec]["subgroup"] = subgroup(spec, steps, groups)
    return found
