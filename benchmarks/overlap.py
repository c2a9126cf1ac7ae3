"""Step time of a model with several large buckets over an emulated link: who codes a bucket while another one travels.

    torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py [SPEC...] [--bandwidth 400Mbit] [--rounds 15]

The models take turns, step by step, in the same processes. To compare two checkouts, run it in each, in turns, with
PYTHONPATH on its src.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad

TOPK = "ErrorFeedback(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))))"
SPECS = [
    TOPK,
    f"ByName({{}}, default={TOPK})",
    "LowMemory(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))))",
    "MomentumCorrection(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))))",
    "Auto({'topk': AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4)))}, warmup=1, trial=3)",
    "AllReduce(BF16())",
]


def make(spec: str, bandwidth: str) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=8)
    tersegrad.attach(model, spec, network=tersegrad.Throttled(bandwidth))
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", nargs="*", default=SPECS)
    parser.add_argument("--bandwidth", default="400Mbit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=75, help="steps before, in which Auto makes its choice")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(dist.get_rank()))
    models = {spec: make(spec, args.bandwidth) for spec in args.spec}
    times: dict[str, list[float]] = {spec: [] for spec in models}
    for turn in range(args.warmup + args.rounds):
        for spec, model in models.items():
            if turn < args.warmup - 4 and not spec.startswith("Auto"):
                continue
            model.zero_grad()
            dist.barrier()
            started = time.perf_counter()
            model(x).square().mean().backward()
            if turn >= args.warmup:
                times[spec].append(1e3 * (time.perf_counter() - started))
    if dist.get_rank() == 0:
        for spec, found in times.items():
            ordered = sorted(found)
            low, high = ordered[len(found) // 5], ordered[-1 - len(found) // 5]
            print(f"{statistics.median(found):8.1f} [{low:.1f}, {high:.1f}] ms  {spec}", flush=True)


if __name__ == "__main__":
    main()
