"""What runs inside gloo processes: training goes on from states that version 0.1 saved (tests/golden)."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad

FOLDER = Path(__file__).parents[1] / "golden" / "checkpoint-0.1"
SAVED_AT, END = 4, 8  # steps


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(4, 12, generator=generator)


def go_on() -> dict[str, dict[str, Any]] | None:
    """Takes up every state and trains to the end; how far the weights are from where version 0.1 ended."""
    group = dist.new_group([0, 1], backend="gloo")
    ours = dist.new_group([0, 1], backend="gloo")
    if dist.get_rank() > 1:
        return None
    saved = torch.load(FOLDER / f"rank{dist.get_rank()}.pt", weights_only=True)
    return {spec: _go_on(spec, entry, group, ours) for spec, entry in saved.items()}


def _go_on(spec: str, entry: dict[str, Any], group: Any, ours: Any) -> dict[str, Any]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)), process_group=group)
    model.module.load_state_dict(entry["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tersegrad.attach(model, spec, optimizer=optimizer, group=ours)
    try:
        handle.load_state_dict(entry["state"])
    except ValueError as error:
        return {"refused": str(error)}
    finally:
        if "LowMemory" in spec:
            handle.close()
    for step in range(SAVED_AT, END):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    handle.close()
    pairs = zip(model.parameters(), entry["weights"], strict=True)
    return {"off": max(float((a - b).abs().max()) for a, b in pairs)}
