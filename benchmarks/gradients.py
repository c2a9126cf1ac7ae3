"""Real gradients for other benchmarks: one worker trains a workload of the lab and writes some of its gradients.

    python benchmarks/gradients.py shakespeare-gpt --data DIR --steps 0 100 300 --out FILE.npz

The file holds a flat float32 vector for each of these steps (``step0``, ...), and ``param_names``, ``param_numel`` and
``param_shapes``.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from tersegrad.lab import workloads


def collect(workload: workloads.Workload, data: Path | None, steps: list[int], seed: int) -> dict[str, np.ndarray]:
    """The flat gradients of these steps of a plain run, the first batches of its first epoch."""
    loaded, model = workload.load(data), workload.model(seed)
    optimizer = workload.optimizer(model)
    schedule = workload.schedule(optimizer, 4 * max(steps) + 1)
    found, state = {}, None
    for step, batch in enumerate(workload.batches(loaded, 0, 0, 1, seed)):
        optimizer.zero_grad()
        loss, state = workload.loss(model, batch, state)
        loss.backward()
        if step in steps:
            found[f"step{step}"] = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).numpy()
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        if step == max(steps):
            break
        workload.clip(model)
        optimizer.step()
        schedule.step()
    named = list(model.named_parameters())
    found["param_names"] = np.array([name for name, _ in named])
    found["param_numel"] = np.array([p.numel() for _, p in named])
    found["param_shapes"] = np.array([str(tuple(p.shape)) for _, p in named])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("--data", type=Path, help="where the dataset lies")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 100], help="whose gradients are written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    np.savez(args.out, **collect(workloads.find(args.workload), args.data, args.steps, args.seed))


if __name__ == "__main__":
    main()
