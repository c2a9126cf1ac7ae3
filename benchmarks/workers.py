"""Workers of a benchmark: processes if it was started by torchrun, else threads."""

from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import TypeVar

import torch.distributed as dist

from tersegrad.comm import threads
from tersegrad.comm.torch import TorchComm
from tersegrad.core import Comm

T = TypeVar("T")


def run(size: int, work: Callable[[Comm], T]) -> T:
    """What rank 0 returns of ``work`` on ``size`` workers."""
    if size == 1 or not dist.is_torchelastic_launched():
        return threads.run(size, work)[0]
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    assert dist.get_world_size() == size, f"start this with torchrun --nproc-per-node {size}"
    return work(TorchComm(dist.group.WORLD))


def main(benchmark: Callable[[], None]) -> None:
    """Runs the benchmark; only rank 0 speaks."""
    if not dist.is_torchelastic_launched():
        benchmark()
        return
    dist.init_process_group("gloo")
    with redirect_stdout(StringIO()) if dist.get_rank() else nullcontext():
        benchmark()
    dist.barrier()
    dist.destroy_process_group()
