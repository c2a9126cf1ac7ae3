"""What our hook costs when it compresses nothing: Dense() against plain DDP, on loopback.

    torchrun --standalone --nproc-per-node 2 benchmarks/dense_overhead.py [--json FILE]

Two copies of one model take turns, step by step, in the same processes. A third one has torch's own all-reduce hook:
what any hook costs, because DDP folds the division by the number of workers into a copy only where there is none.
"""

import argparse
import copy
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad.lab.timing import environment, interleave, write_rows


def model() -> nn.Module:
    """10.5 million parameters."""
    torch.manual_seed(0)
    sizes = (512, 2048, 2048, 1536, 1024, 512)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    original = model()
    models = {
        name: DistributedDataParallel(copy.deepcopy(original), bucket_cap_mb=8) for name in ("plain", "hook", "ours")
    }
    models["hook"].register_comm_hook(None, allreduce_hook)
    handle = tersegrad.attach(models["ours"], "none")
    x = torch.randn(args.batch, 512)

    def step(ddp: nn.Module) -> None:
        dist.barrier()  # both workers begin together, so that a step is not charged for the other's delay
        for p in ddp.parameters():
            p.grad = None
        ddp(x).square().mean().backward()

    times = interleave({name: lambda ddp=ddp: step(ddp) for name, ddp in models.items()}, args.rounds, warmup=5)
    metrics = handle.metrics()
    handle.close()
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in original.parameters())
        print(f"{parameters / 1e6:.1f} M parameters in {metrics['buckets']} buckets, {dist.get_world_size()} workers")
        for name, ms in times.items():
            print(f"{name:8} {ms!s:28} ms/step   {ms.median / times['plain'].median:.3f}x plain")
        if args.json:
            write_rows(
                args.json,
                (
                    {"what": name, "round": i, "ms": ms, **environment()}
                    for name in times
                    for i, ms in enumerate(times[name].rounds)
                ),
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
