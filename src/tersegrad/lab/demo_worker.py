"""One worker of the demo; ``torchrun`` starts several. Rank 0 prints what happens as JSON lines."""

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad.lab.digits import Digits, accuracy, network

BATCH = 32
LEARNING_RATE = 0.2  # at the start; falls linearly to zero


def main() -> None:
    """Trains once per spec, one after the other, from the same weights on the same batches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--bandwidth", required=True)
    parser.add_argument("--latency", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)  # several workers share this machine
    dist.init_process_group("gloo")
    link = tersegrad.Throttled(args.bandwidth, latency=args.latency)
    digits = Digits.load()
    for spec in args.specs:
        train(spec, digits, link, args.epochs)
    dist.destroy_process_group()


def train(spec: str, digits: Digits, link: tersegrad.Throttled, epochs: int) -> None:
    """One run; time for evaluation is not counted."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    handle = tersegrad.attach(model, spec, network=link)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    total = epochs * len(digits.epoch(0, rank, size, BATCH))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    seconds, steps = 0.0, 0
    for epoch in range(epochs):
        for x, y in digits.epoch(epoch, rank, size, BATCH):
            started = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            seconds += time.perf_counter() - started
            steps += 1
        if rank == 0:
            metrics = handle.metrics()
            score = accuracy(model.module, digits)
            report("epoch", spec, epoch=epoch + 1, steps=steps, seconds=seconds, accuracy=score, metrics=metrics)
    handle.close()


def report(event: str, spec: str, **values: Any) -> None:
    """One line for the parent."""
    print(json.dumps({"event": event, "spec": spec, **values}), flush=True)


if __name__ == "__main__":
    main()
