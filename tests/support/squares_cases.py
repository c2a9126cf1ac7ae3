"""A small transformer on convolved inputs, trained by real gloo processes and by virtual workers alike."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import tersegrad


class Net(nn.Module):
    """Its attention and its scale are no known layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv1d(3, 16, 4, stride=4)
        self.scale = nn.Parameter(torch.ones(16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.outputs = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(self.block(self.patches(x).transpose(1, 2) * self.scale).mean(1))


def batches(worker: int, workers: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
    """Clusters with noise; the same in every call."""
    draw = torch.Generator().manual_seed(1000 * epoch + worker)
    centres = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(5, (40, 12), generator=draw)
    return [(centres[y] + torch.randn(12, 3, 32, generator=draw), y) for y in labels]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def training() -> tersegrad.Training:
    """The same in every process."""
    torch.manual_seed(0)
    model = Net()
    return tersegrad.Training(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches, loss)


def real(spec: str, steps: int) -> tuple[dict[str, Tensor], int]:
    """In one of the processes: the final weights, and the bytes sent."""
    made = training()
    model = DistributedDataParallel(made.model, gradient_as_bucket_view=True)
    handle: Any = tersegrad.attach(model, spec, optimizer=made.optimizer)
    for batch in batches(dist.get_rank(), dist.get_world_size(), 0)[:steps]:
        made.optimizer.zero_grad()
        loss(model, batch).backward()
        made.optimizer.step()
    sent = handle.metrics()["bytes_sent"]
    handle.close()
    return {key: value.clone() for key, value in made.model.state_dict().items()}, sent
