"""One small training, run by real gloo processes and by virtual workers alike."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad.core import needs_of
from tersegrad.hosts._virtual import worker_seed
from tersegrad.specs import parse_reducer

FEATURES, CLASSES, BATCH = 32, 10, 8


class Net(nn.Module):
    """Two buckets after DDP's first step, if it is wide. Batch statistics, unless single samples are looked at."""

    def __init__(self, norm: bool, wide: int = 1000):
        super().__init__()
        self.inputs = nn.Linear(FEATURES, 270)
        self.norm = nn.BatchNorm1d(270) if norm else nn.LayerNorm(270)
        self.hidden = nn.Linear(270, wide)
        self.dropout = nn.Dropout(0.2)
        self.outputs = nn.Linear(wide, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.dropout(functional.relu(self.hidden(self.norm(functional.relu(self.inputs(x)))))))


def batches(worker: int, workers: int, epoch: int, length: int = 20) -> list[tuple[Tensor, Tensor]]:
    """Clusters with noise; the same in every call."""
    draw = torch.Generator().manual_seed(1000 * epoch + worker)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(7))
    found = []
    for _ in range(length):
        y = torch.randint(CLASSES, (BATCH,), generator=draw)
        found.append((centres[y] + 0.7 * torch.randn(BATCH, FEATURES, generator=draw), y))
    return found


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def evaluate(model: nn.Module) -> float:
    x, y = map(torch.cat, zip(*batches(999, 1, 0), strict=True))
    return float((model(x).argmax(1) == y).float().mean())


def training(
    spec: str, seed: int = 0, accumulate: int = 1, max_norm: float | None = None, wide: int = 1000
) -> tersegrad.Training:
    """The same in every process."""
    needs = needs_of(parse_reducer(spec))
    torch.manual_seed(seed)
    model = Net(needs.squares is None, wide)
    momentum = 0.0 if needs.no_momentum else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    return tersegrad.Training(
        model,
        optimizer,
        batches,
        loss,
        evaluate,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.01 * step)),
        accumulate=accumulate,
        max_norm=max_norm,
    )


def narrow(seed: int) -> tersegrad.Training:
    """A factory."""
    return training("none", seed, wide=50)


def real(specs: list[str], workers: int, steps: int, **how: Any) -> list[Any]:
    """In one of the processes: per spec the final weights and buffers, the bytes sent, and auto's decisions."""
    group = dist.new_group(list(range(workers)))
    own = [dist.new_group(list(range(workers)), backend="gloo") for _ in specs]
    if dist.get_rank() >= workers:
        return []
    return [_real(spec, group, mine, steps, **how) for spec, mine in zip(specs, own, strict=True)]


def _real(
    spec: str, group: Any, own: Any, steps: int, accumulate: int = 1, bucket_cap_mb: int | None = None, **how: Any
) -> Any:
    rank, workers = dist.get_rank(group), dist.get_world_size(group)
    made = training(spec, 0, accumulate, **how)
    model = DistributedDataParallel(
        made.model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb
    )
    handle = tersegrad.attach(model, spec, optimizer=made.optimizer, group=own)
    torch.manual_seed(worker_seed(0, rank))
    feed = ((batch) for epoch in range(1000) for batch in batches(rank, workers, epoch))
    for _ in range(steps):
        made.optimizer.zero_grad()
        for _ in range(accumulate - 1):
            with model.no_sync():
                (loss(model, next(feed)) / accumulate).backward()
        value = loss(model, next(feed))
        (value / accumulate if accumulate > 1 else value).backward()
        if made.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), made.max_norm)
        made.optimizer.step()
        made.schedule.step()
    metrics = handle.metrics()
    handle.close()
    state = {key: value.clone() for key, value in made.model.state_dict().items()}
    return state, metrics["bytes_sent"], metrics["decisions"]


def virtual(
    spec: str,
    workers: int,
    steps: int,
    decisions: Any = None,
    processes: int = 1,
    bucket_cap_mb: int | None = None,
    **how: Any,
) -> tersegrad.Simulation:
    """As many steps in this process."""
    own = {"decisions": decisions, "processes": processes, "bucket_cap_mb": bucket_cap_mb}
    simulation = tersegrad.Simulation(training(spec, 0, **how), spec, workers, **own)
    for _ in range(steps):
        simulation.step()
    return simulation
