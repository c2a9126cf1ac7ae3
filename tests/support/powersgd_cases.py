"""torch's own PowerSGD hook and ours, side by side in gloo processes."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from tersegrad.comm.torch import TorchComm
from tersegrad.core import Layout, Step, reduce, state
from tersegrad.reducers import PowerSGD
from tersegrad.wrappers import ErrorFeedback

LAYOUT = Layout(
    ("a.weight", "a.bias", "conv.weight", "b.weight", "small.weight"),
    ((40, 30), (40,), (16, 8, 3, 3), (40, 30), (2, 2)),
)
MATRICES = {"a.weight": (40, 30), "b.weight": (40, 30), "conv.weight": (16, 72)}  # in the order in which torch packs


class OneBucket:
    """As much of DDP's bucket as torch's hook looks at."""

    def __init__(self, flat: Tensor):
        self.flat = flat

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        parts = self.flat.split(LAYOUT.sizes)
        return [part.view(shape) for part, shape in zip(parts, LAYOUT.shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def gradient(rank: int, step: int) -> Tensor:
    """A part that all workers and steps have in common, and noise."""
    common = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(99))
    return common + torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(100 * step + rank))


def torch_state(rank: int, error_feedback: bool, start: dict[str, Tensor]) -> PowerSGDState:
    """Compresses from the first step on what we compress, and begins with our Q."""
    made = PowerSGDState(
        None, rank, start_powerSGD_iter=2, min_compression_rate=1, use_error_feedback=error_feedback, warm_start=True
    )
    made.iter = 2
    ranks = {name: min(rank, *shape) for name, shape in MATRICES.items()}
    made.p_memory_dict[0] = torch.empty(sum(shape[0] * ranks[name] for name, shape in MATRICES.items()))
    made.q_memory_dict[0] = torch.cat([start[name].reshape(-1) for name in MATRICES])
    return made


def compare(rank: int, error_feedback: bool, steps: int) -> dict[str, Any]:
    """Largest difference of the means, of the mean memory and of one's own memory, relative to the gradient."""
    comm = TorchComm(dist.group.WORLD)
    reducer = ErrorFeedback(PowerSGD(rank)) if error_feedback else PowerSGD(rank)
    memory = reducer.init(LAYOUT, comm)
    inner = memory["inner"] if error_feedback else memory
    theirs = torch_state(rank, error_feedback, {f["names"][0]: f["q"].clone() for f in inner["factors"].values()})
    worst = 0.0
    for step in range(steps):
        x = gradient(comm.rank, step)
        mean = powerSGD_hook(theirs, OneBucket(x.clone())).wait()
        out = torch.empty_like(x)
        reduce(reducer, Step(LAYOUT, step), x, out, memory, comm)
        state.commit(memory)
        worst = max(worst, float((out - mean).abs().max() / mean.abs().max()))
    found = {"means": worst, "compressed": float((out - gradient(comm.rank, step)).norm()) > 1.0}
    if error_feedback:
        memories = torch.stack([memory["residual"], theirs.error_dict[0]])
        found["own memory"] = float((memories[0] - memories[1]).abs().max())
        comm.all_reduce(memories)
        found["mean memory"] = float((memories[0] - memories[1]).abs().max() / memories[1].abs().max())
    return found
