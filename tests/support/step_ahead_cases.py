"""What runs inside the gloo worker processes of wrappers/test_step_ahead.py."""

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad.wrappers import StepAhead

TAU, LR = 0.02, 0.1
SPEC = f"StepAhead(ErrorFeedback(AllGather(Threshold(tau={TAU}))))"


def net(memory_format: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 20), nn.Tanh(), nn.Linear(20, 5))
    return layers.to(memory_format=memory_format)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 3, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def loss(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, y)


def attached(
    spec: str = SPEC, memory_format: torch.memory_format = torch.contiguous_format, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, tersegrad.Handle]:
    model = DistributedDataParallel(net(memory_format), bucket_cap_mb=0.01)
    slow, fast = list(model.parameters())[:2], list(model.parameters())[2:]
    groups = [{"params": slow, "lr": LR / 2}, {"params": fast, "lr": LR}]
    optimizer = torch.optim.SGD(groups, lr=LR)
    return model, optimizer, tersegrad.attach(model, spec, optimizer=optimizer, **options)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def by_hand(steps: int, by: float, micro: int, clip: float) -> list[Tensor]:
    """All workers in this process, in plain torch: the weights after so many steps."""
    module = net(torch.contiguous_format)
    names = [name for name, _ in module.named_parameters()]
    rates = {name: LR / 2 if name in names[:2] else LR for name in names}
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    late = [{name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(dist.get_world_size())]
    share = 1.0
    for step in range(steps):
        mean = {name: torch.zeros_like(w) for name, w in weights.items()}
        for rank, memory in enumerate(late):
            there = {
                name: (w - by * share * rates[name] * memory[name]).requires_grad_() for name, w in weights.items()
            }
            parts = [batch(rank, 100 * part + step) for part in range(micro)]
            total = sum(loss(functional_call(module, there, x), y) for x, y in parts)
            gradients = torch.autograd.grad(total, list(there.values()))
            for name, gradient in zip(names, gradients, strict=True):
                memory[name] += gradient
                sent = torch.where(memory[name].abs() > TAU, memory[name], 0.0)
                memory[name] -= sent
                mean[name] += sent / len(late)
        share = min(1.0, clip / float(torch.cat([m.flatten() for m in mean.values()]).norm()))
        for name, w in weights.items():
            w -= share * rates[name] * mean[name]
    return list(weights.values())


def train(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    steps: range,
    micro: int = 1,
    clip: float = math.inf,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step in steps:
        optimizer.zero_grad()
        for part in range(micro):
            with model.no_sync() if part < micro - 1 else contextlib.nullcontext():
                x, y = batch(dist.get_rank(), 100 * part + step)
                scaler.scale(loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


def as_by_hand(
    by: float, memory_format: torch.memory_format, micro: int = 1, clip: float = math.inf, scaled: bool = False
) -> tuple[float, float]:
    """The largest difference from what is made by hand; and from what is made without a step ahead."""
    spec = repr(StepAhead(tersegrad.parse(SPEC).inner, by=by))  # type: ignore[attr-defined]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) if scaled else None
    model, optimizer, handle = attached(spec, memory_format, scaler=scaler)
    train(model, optimizer, range(5), micro, clip, scaler)
    handle.close()
    mine = values(model)
    return difference(mine, by_hand(5, by, micro, clip)), difference(mine, by_hand(5, 0.0, micro, clip))


def whereabouts() -> dict[str, float]:
    """How far the parameters are from home at several moments; 0 where they should be back to the bit."""
    model, optimizer, handle = attached()
    train(model, optimizer, range(3))
    home = values(model)
    x, y = batch(dist.get_rank(), 3)
    away: dict[str, float] = {}

    def look(moment: str) -> None:
        away[moment] = difference(values(model), home)

    outputs = model(x)
    look("in a step")
    loss(outputs, y).backward()
    look("after backward")
    with model.no_sync():
        loss(model(x), y).backward()
    look("after no_sync")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    look("when the optimizer steps")
    for group in optimizer.param_groups:
        group["lr"] = LR
    model(x)
    away["saved"] = difference(list(model.module.state_dict().values()), home)
    model(x)
    with torch.no_grad():
        model(x)
    look("in an evaluation without gradients")
    model(x)
    model.eval()
    model(x)
    look("in eval mode")
    model.train()
    twin = copy.deepcopy(model.module)
    away["copied"] = difference(values(twin), home)
    copy.deepcopy(model)(x)
    look("when a copy runs")
    model(x)
    handle.close()
    look("closed")
    model(x)
    look("after that")
    return away


def checked_replicas() -> list[Tensor]:
    """Compares parameters while they are away, in every step."""
    model, optimizer, handle = attached(check_replicas=1)
    train(model, optimizer, range(4))
    handle.close()
    return values(model)


def flushed(memory_format: torch.memory_format) -> float:
    """Everything is sent in the end: .grad holds the mean of what waited, element by element."""
    model, optimizer, handle = attached("ErrorFeedback(AllGather(Threshold(tau=1000.0)))", memory_format)
    plain = DistributedDataParallel(net(memory_format))
    x, y = batch(dist.get_rank(), 0)
    for one in (model, plain):
        loss(one(x), y).backward()
    optimizer.zero_grad()
    handle.flush()
    handle.close()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)  # type: ignore[operator]


def refusals() -> None:
    """What cannot work is refused before anything is attached."""
    model = DistributedDataParallel(net(torch.contiguous_format))
    with pytest.raises(ValueError, match="optimizer=optimizer"):
        tersegrad.attach(model, SPEC)
    with pytest.raises(ValueError, match="and not of Adam"):
        tersegrad.attach(model, SPEC, optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(ValueError, match="around all the rest"):
        tersegrad.attach(model, f"Warmup({SPEC}, steps=3)", optimizer=torch.optim.SGD(model.parameters(), lr=LR))
