"""What runs inside the gloo worker processes of test_reliability.py."""

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from support.ddp_cases import Net, digest, loss, make, steps
from tersegrad.hosts.distributed_checkpoint import Shards
from tersegrad.testing.runs import same


def attach(model: DistributedDataParallel, spec: str, **options: Any) -> tersegrad.Handle:
    return tersegrad.attach(model, spec, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), **options)


def poison(model: DistributedDataParallel, value: float) -> Any:
    """From now on, one gradient of rank 1 is not finite; the one that DDP sees first."""
    if dist.get_rank() != 1:
        return None
    return model.module.last.bias.register_hook(lambda g: torch.full_like(g, value))


def memory(handle: tersegrad.Handle) -> dict[str, Any]:
    return handle.state_dict()["tensors"]


def overflow(spec: str, policy: str, value: float) -> dict[str, Any]:
    """Three steps, a poisoned one, three more."""
    model = make({})
    handle = attach(model, spec, nonfinite=policy)
    steps(model, 0, 3)
    before = memory(handle)
    hook = poison(model, value)
    model.zero_grad()
    said = ""
    try:
        loss(model, 3).backward()
    except Exception as error:
        said = str(error)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    found = {
        "said": said,
        "finite": all(bool(g.isfinite().all()) for g in grads),
        "zero": not any(bool(g.any()) for g in grads),
        "kept": same(before, memory(handle)),
        "counted": handle.metrics()["nonfinite_steps"],
    }
    if hook is not None:
        hook.remove()
    if not said:
        found["losses"] = steps(model, 4, 3)
        found["digest"] = digest(model)
    handle.close()
    return found


def scale_changes(spec: str) -> float:
    """Fixed weights, a loss scale that changes: sum of unscaled means + mean residual - sum of gradients, relative."""
    model = make({})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    handle = attach(model, spec, scaler=scaler)
    module = model.module
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    sent, local = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for step in range(6):
        grads = torch.autograd.grad(loss(module, step), [p for p in module.parameters() if p.requires_grad])
        model.zero_grad()
        scaler.scale(loss(model, step)).backward()
        for name, g in zip(names, grads, strict=True):
            local[name] = local[name] + g
            sent[name] = sent[name] + module.get_parameter(name).grad / scaler.get_scale()
        scaler.update(1024.0 * 4.0 ** (step - 2))
    saved = memory(handle)
    handle.close()
    worst = 0.0
    for name in names:
        share = torch.stack([local[name], saved[name]["residual"].reshape(local[name].shape)])
        dist.all_reduce(share)
        total, late = share / dist.get_world_size()
        worst = max(worst, float((sent[name] + late - total).abs().max() / total.abs().max()))
    return worst


def amp(spec: str, overflow_at: int) -> dict[str, Any]:
    """A GradScaler's usual loop, with one overflow."""
    model = make({})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    handle = attach(model, spec, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scales, losses = [], []
    for step in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(model, step)
        hook = poison(model, float("inf")) if step == overflow_at else None
        scaler.scale(value).backward()
        if hook is not None:
            hook.remove()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(float(value))
    found = {"scales": scales, "losses": losses, "digest": digest(model), "metrics": handle.metrics()}
    handle.close()
    return found


def narrow_parameters(spec: str, dtype: str) -> dict[str, Any]:
    """A whole model in a narrow float."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10)).to(getattr(torch, dtype))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
    handle = attach(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        model(x.to(getattr(torch, dtype))).square().mean().backward()
        optimizer.step()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    handle.close()
    raw = b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return {"finite": finite, "bytes": raw}


def resume(specs: list[str]) -> dict[str, bool]:
    """Whether a run that is resumed ends as the one that went on, to the bit, in DDP's usual buckets."""
    return {spec: _resume(spec) for spec in specs}


def _resume(spec: str) -> bool:
    whole = make({})
    handle = attach(whole, spec)
    steps(whole, 0, 3)
    buffer = io.BytesIO()
    torch.save({"model": whole.state_dict(), "tersegrad": handle.state_dict()}, buffer)
    steps(whole, 3, 3)
    handle.close()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed = make({})
    resumed.load_state_dict(saved["model"])
    handle = attach(resumed, spec)
    handle.load_state_dict(saved["tersegrad"])
    again = handle.state_dict()
    unchanged = same(again["tensors"], saved["tersegrad"]["tensors"])
    steps(resumed, 3, 3)
    handle.close()
    return unchanged and digest(whole) == digest(resumed)


def late(handle: tersegrad.Handle, group: Any = None) -> dict[str, torch.Tensor]:
    """The mean over ranks of what is remembered, by parameter; flushes it."""
    handle.flush()
    return {name: p.grad.clone() for name, p in handle._parameters.items() if p.grad is not None}


def elastic(specs: list[str], folder: str) -> dict[str, Any]:
    """Saved by four ranks, loaded by two and by three: the mean of what is late is what it was."""
    rank, found = dist.get_rank(), {}
    groups = {n: (list(range(n)), dist.new_group(list(range(n))), dist.new_group(list(range(n)))) for n in (2, 3)}
    for number, spec in enumerate(specs):
        model = make({})
        handle = attach(model, spec)
        steps(model, 0, 3)
        torch.save(handle.state_dict(), Path(folder) / f"{number}-{rank}.pt")
        dist.barrier()
        before = late(handle)
        handle.close()
        for size, (ranks, for_ddp, for_us) in groups.items():
            if rank in ranks:
                torch.manual_seed(0)
                smaller = DistributedDataParallel(Net(), process_group=for_ddp, bucket_cap_mb=0.2)
                handle = attach(smaller, spec, group=for_us)
                one = torch.load(Path(folder) / f"{number}-{rank}.pt", weights_only=True)
                refused = ""
                try:
                    handle.load_state_dict(one)
                except ValueError as error:
                    refused = str(error)
                files = [Path(folder) / f"{number}-{r}.pt" for r in (2, 0, 3, 1)]
                handle.load_state_dict(torch.load(file, weights_only=True) for file in files)
                after = late(handle)
                worst = max(float((after[n] - before[n]).abs().max()) for n in before)
                largest = max(float(b.abs().max()) for b in before.values())
                steps(smaller, 3, 2)
                finite = all(bool(p.isfinite().all()) for p in smaller.parameters())
                found[spec, size] = {"worst": worst, "largest": largest, "refused": refused, "finite": finite}
                handle.close()
        dist.barrier()
    return found


def through_dcp(folder: str) -> dict[str, Any]:
    """Saved by four ranks with torch.distributed.checkpoint; loaded by four, and by two."""
    model = make({})
    handle = attach(model, "topk")
    steps(model, 0, 3)
    dcp.save({"model": model.state_dict(), "tersegrad": Shards(handle)}, checkpoint_id=folder)
    saved, before = memory(handle), late(handle)
    handle.close()
    fresh = make({})
    handle = attach(fresh, "topk")
    dcp.load({"model": fresh.state_dict(), "tersegrad": Shards(handle, folder)}, checkpoint_id=folder)
    found = {"four": same(saved, memory(handle))}
    handle.close()
    ranks = [0, 1]
    for_ddp, for_us = dist.new_group(ranks), dist.new_group(ranks)
    if dist.get_rank() in ranks:
        smaller = DistributedDataParallel(Net(), process_group=for_ddp)
        handle = attach(smaller, "topk", group=for_us)
        dcp.load({"tersegrad": Shards(handle, folder)}, checkpoint_id=folder, process_group=for_ddp)
        after = late(handle)
        found["two"] = max(float((after[n] - before[n]).abs().max()) for n in before) < 1e-6
        handle.close()
    dist.barrier()
    return found


def misfits() -> dict[str, str]:
    """What loading says about states that do not fit, and that nothing has changed then."""
    model = make({})
    handle = attach(model, "topk")
    steps(model, 0, 2)
    good = handle.state_dict()
    tensors = good["tensors"]
    wrong = {**tensors["last.weight"], "residual": torch.zeros(3)}
    cases = {
        "extra": {**good, "tensors": {**tensors, "ghost": tensors["last.bias"]}},
        "missing": {**good, "tensors": {n: t for n, t in tensors.items() if n != "last.bias"}},
        "misshapen": {**good, "tensors": {**tensors, "last.weight": wrong}},
        "spec": {**good, "spec": "Dense()"},
        "format": {**good, "format": 99},
        "rank": {**good, "rank": (good["rank"] + 1) % 4},
        "not a state": [{"a": 1}],
        "one missing": [good],
        "twice": [good, good],
    }
    said = {}
    for name, bad in cases.items():
        try:
            handle.load_state_dict(bad)
        except ValueError as error:
            said[name] = str(error)
        assert same(memory(handle), tensors), f"{name}: the memory has changed"
    for name in ("extra", "missing", "misshapen"):
        handle.load_state_dict(cases[name], strict=False)
        kept = memory(handle)
        fits = [n for n in tensors if n in cases[name]["tensors"] and not (name == "misshapen" and n == "last.weight")]
        assert all(same(kept[n], tensors[n]) for n in fits), name
        assert set(kept) == set(fits), name
        steps(model, 2, 1)
        handle.load_state_dict(good)
    handle.close()
    return said


def replicas() -> dict[str, str]:
    """One rank changes a weight; every rank is told which."""
    model = make({})
    handle = attach(model, "topk", check_replicas=2)
    steps(model, 0, 4)
    if dist.get_rank() == 2:
        with torch.no_grad():
            model.module.hidden.bias[3] += 1e-6
            model.module.last.weight[0] *= 1.0001
    said = ""
    try:
        steps(model, 4, 2)
    except Exception as error:
        said = str(error)
    handle.close()
    return {"said": said}


def joined(spec: str) -> str:
    """Uneven inputs: ranks have 2, 3, 4 and 5 batches."""
    model = make({})
    handle = attach(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
    handle.close()
    return digest(model)


def compiled(spec: str, order: str) -> dict[str, Any] | None:
    """torch.compile around DDP or inside; without a C++ compiler, which is not what is tested.

    On two ranks: each compiles the same for seconds.
    """
    group, ours = dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    torch.manual_seed(0)
    options: dict[str, Any] = {"bucket_cap_mb": 1, "process_group": group}
    if order == "outside":
        model = DistributedDataParallel(Net(), **options)
        runs: Any = torch.compile(model, backend="aot_eager")
    else:
        model = runs = DistributedDataParallel(torch.compile(Net(), backend="aot_eager"), **options)
    handle = attach(model, spec, group=ours)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        loss(runs, step).backward()
        optimizer.step()
    metrics = handle.metrics()
    handle.close()
    torch._dynamo.reset()
    return {"digest": digest(model), "steps": metrics["steps"]}
