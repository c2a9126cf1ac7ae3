"""What runs inside the gloo worker processes of test_ddp.py."""

import contextlib
import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad.core import Comm, Finish, Needs, State, Step, Vector
from tersegrad.reducers import Dense


class Net(nn.Module):
    """Convolution, norm, linear layers, and optionally a part that is not always used."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.Linear(8 * 36, 120).to(dtype)
        self.extra = nn.Linear(120, 120).to(dtype)
        self.last = nn.Linear(120, 10)
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)

    def forward(self, x: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1).to(self.hidden.weight.dtype)
        x = torch.relu(self.hidden(x))
        if use_extra:
            x = torch.relu(self.extra(x))
        return self.last(x.to(self.last.weight.dtype)) * self.frozen


def make(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Net(dtype), **{"bucket_cap_mb": 0.05, **options})


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(0, 10, (8,), generator=generator)


def loss(model: nn.Module, step: int, **kwargs: Any) -> torch.Tensor:
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x, **kwargs).float(), y)


def digest(model: nn.Module) -> str:
    raw = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(raw).hexdigest()


def steps(model: nn.Module, first: int, count: int, accumulate: int = 1, lr: float = 0.05) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        for micro in range(accumulate):
            hold = model.no_sync() if micro < accumulate - 1 else contextlib.nullcontext()
            with hold:
                value = loss(model, 100 * micro + step)
                value.backward()
        optimizer.step()
        losses.append(float(value))
    return losses


def train(spec: str, options: dict[str, Any], accumulate: int = 1, dtype: str = "float32") -> dict[str, Any]:
    model = make(options, getattr(torch, dtype))
    handle = tersegrad.attach(model, spec, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
    losses = steps(model, 0, 6, accumulate)
    metrics = handle.metrics()
    assert handle.metrics(norms=False) == {key: value for key, value in metrics.items() if key != "residual_norm"}
    handle.close()
    return {"digest": digest(model), "losses": losses, "metrics": metrics}


def same_as_plain(options: dict[str, Any], dtype: str = "float32") -> float:
    """Largest difference between plain DDP's parameters and Dense()'s after six steps."""
    plain, ours = make(options, getattr(torch, dtype)), make(options, getattr(torch, dtype))
    handle = tersegrad.attach(ours, Dense())
    for model in (plain, ours):
        steps(model, 0, 6)
    handle.close()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def straight_to_the_group(spec: str, options: dict[str, Any], count: int) -> dict[str, Any]:
    """The same training with and without the worker thread; nonfinite="skip" needs it in every step."""
    found: dict[str, Any] = {"plain": 0}
    for policy in ("propagate", "skip"):
        model = make(options)
        handle = tersegrad.attach(model, spec, nonfinite=policy)
        engine = handle._engine
        submit = engine.submit

        def counted(
            gradient: Any, last: bool, policy: str = policy, engine: Any = engine, submit: Any = submit
        ) -> None:
            submit(gradient, last)
            key = "plain" if policy == "propagate" else "wrong"
            if engine._uncompressed_step:
                found[key] = found.get(key, 0) + last

        engine.submit = counted  # type: ignore[method-assign]
        steps(model, 0, count)
        metrics = handle.metrics()
        found[policy] = [digest(model), metrics["bytes_sent"], metrics["dense_bytes"], metrics["steps"]]
        found["waited"] = metrics["wait_seconds"] > 0
        handle.close()
    return found


def telescoping(spec: str, options: dict[str, Any]) -> float:
    """With fixed weights over DDP's rebuild: sum of means + mean residual - sum of mean gradients, relative."""
    model = make(options)
    handle = tersegrad.attach(model, spec)
    module = model.module
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    sent = dict.fromkeys(names, 0.0)
    local = dict.fromkeys(names, 0.0)
    for step in range(5):
        grads = torch.autograd.grad(loss(module, step), [p for p in module.parameters() if p.requires_grad])
        model.zero_grad()
        loss(model, step).backward()
        for name, g in zip(names, grads, strict=True):
            local[name] = local[name] + g
            sent[name] = sent[name] + module.get_parameter(name).grad
    saved = handle.state_dict()["tensors"]
    handle.close()
    worst = 0.0
    for name in names:
        residual = saved[name]["residual"].reshape(local[name].shape)
        share = torch.stack([local[name], residual])
        dist.all_reduce(share)
        total, late = share / dist.get_world_size()
        worst = max(worst, float((sent[name] + late - total).abs().max() / total.abs().max()))
    return worst


def resume(spec: str) -> dict[str, Any]:
    """Six steps at once, and three, a checkpoint through bytes, a new model and hook, and three more."""
    whole = make({})
    handle = tersegrad.attach(whole, spec)
    steps(whole, 0, 6)
    handle.close()
    first = make({})
    handle = tersegrad.attach(first, spec)
    steps(first, 0, 3)
    buffer = io.BytesIO()
    torch.save({"model": first.state_dict(), "tersegrad": handle.state_dict()}, buffer)
    handle.close()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    second = make({"bucket_cap_mb": 0.2})
    second.load_state_dict(saved["model"])
    handle = tersegrad.attach(second, spec)
    handle.load_state_dict(saved["tersegrad"])
    steps(second, 3, 3)
    handle.close()
    return {"whole": digest(whole), "resumed": digest(second)}


class _Spy(Dense):
    """Plain, but wants squares and keeps what it is given."""

    def needs(self) -> Needs:
        return Needs(squares="samples", float32=False)

    def start(self, step: Step, x: Vector, out: torch.Tensor, state: State, comm: Comm) -> Finish:
        assert step.squares is not None
        for name, part in zip(step.layout.names, step.squares.split(step.layout.sizes), strict=True):
            seen[name] = part.clone()
        return super().start(step, x, out, state, comm)


seen: dict[str, torch.Tensor] = {}


def squares_in_the_hook(options: dict[str, Any], accumulate: int) -> float:
    """Largest relative error of the squares that the reducer sees, over steps, against a loop over samples."""
    model = make(options)
    handle = tersegrad.attach(model, _Spy())
    worst = 0.0
    for step in range(4):
        seen.clear()
        steps(model, step, 1, accumulate, lr=0.0)
        module = model.module
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        want = dict.fromkeys(names, 0.0)
        for micro in range(accumulate):
            x, y = batch(100 * micro + step)
            for i in range(len(x)):
                value = nn.functional.cross_entropy(module(x[i : i + 1]), y[i : i + 1]) / len(x)
                grads = torch.autograd.grad(value, [p for p in module.parameters() if p.requires_grad])
                for name, g in zip(names, grads, strict=True):
                    want[name] = want[name] + g.square().flatten()
        for name in names:
            worst = max(worst, float((seen[name] - want[name]).abs().max() / want[name].abs().max()))
    handle.close()
    return worst


def flush(spec: str, after_loading: bool) -> dict[str, float]:
    """With fixed weights: sum of means + what flush gives - sum of mean gradients, relative; and a second flush."""
    model = make({})
    handle = tersegrad.attach(model, spec)
    names = [name for name, p in model.module.named_parameters() if p.requires_grad]
    parameters = [model.module.get_parameter(name) for name in names]
    sent, local = [0.0] * len(names), [0.0] * len(names)
    for step in range(4):
        grads = torch.autograd.grad(loss(model.module, step), parameters)
        model.zero_grad()
        loss(model, step).backward()
        local = [a + g for a, g in zip(local, grads, strict=True)]
        sent = [a + p.grad for a, p in zip(sent, parameters, strict=True)]
    if after_loading:
        saved = handle.state_dict()
        handle.close()
        handle = tersegrad.attach(model, spec)
        handle.load_state_dict(saved)
    handle.flush()
    worst = 0.0
    for a, total, p in zip(sent, local, parameters, strict=True):
        dist.all_reduce(total)
        total /= dist.get_world_size()
        worst = max(worst, float((a + p.grad - total).abs().max() / total.abs().max()))
    largest = max(float(p.grad.abs().max()) for p in parameters)
    handle.flush()
    left = max(float(p.grad.abs().max()) for p in parameters)
    steps(model, 4, 1)
    handle.close()
    return {"error": worst, "flushed": largest, "left": left}


def refusals() -> dict[str, str]:
    """Everything attach() and load_state_dict() refuse, with the words they use."""
    said = {}

    def expect(key: str, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (ValueError, TypeError, RuntimeError) as error:
            said[key] = f"{type(error).__name__}: {error}"

    model = make({})
    expect("not ddp", tersegrad.attach, model.module, "topk")
    expect("unknown", tersegrad.attach, model, "topkk")
    expect("compressor", tersegrad.attach, model, "TopK(0.1)")
    heavy = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expect("momentum", tersegrad.attach, model, "MomentumCorrection(AllGather(TopK(0.1)))", optimizer=heavy)
    expect("lr", tersegrad.attach, model, "Schedule(AllGather(TopK(0.1)), 'ratio', smoothness=1.0)")
    expect("timeout", tersegrad.attach, model, "topk", timeout=0)
    other = "topk" if dist.get_rank() else "bf16"
    expect("disagree", tersegrad.attach, model, other)
    handle = tersegrad.attach(model, "topk")
    expect("twice", tersegrad.attach, model, "bf16")
    steps(model, 0, 2)
    saved = handle.state_dict()
    expect("format", handle.load_state_dict, {**saved, "format": 99})
    expect("other spec", handle.load_state_dict, {**saved, "spec": "Dense()"})
    less = {k: v for k, v in saved["tensors"].items() if k != "conv.bias"}
    expect("missing", handle.load_state_dict, {**saved, "tensors": less})
    expect("extra", handle.load_state_dict, {**saved, "tensors": {**saved["tensors"], "head.weight": {}}})
    handle.close()
    hooked = make({})
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    hooked.register_comm_hook(None, allreduce_hook)
    expect("hook", tersegrad.attach, hooked, "topk")
    return said


def close_and_reattach() -> dict[str, Any]:
    """Closed, the model is plain DDP again; attached anew, it compresses again; close is harmless twice."""
    model, plain = make({}), make({})
    handle = tersegrad.attach(model, "none")
    steps(model, 0, 2)
    handle.close()
    handle.close()
    after_close = handle.metrics()["steps"]
    steps(model, 2, 2)
    steps(plain, 0, 4)
    difference = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    again = tersegrad.attach(model, "topk")
    steps(model, 4, 2)
    ratio = again.metrics()["ratio"]
    again.close()
    return {"difference": difference, "steps": after_close, "ratio": ratio, "digest": digest(model)}


class _Broken(Comm):
    """Fails in its tenth collective."""

    def __init__(self, inner: Comm):
        self.inner, self.rank, self.size, self.calls = inner, inner.rank, inner.size, 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("start_all_reduce", "start_shift"):
            self.calls += 1
            if self.calls > 10:
                raise OSError("the cable was cut")
            return getattr(self.inner, name)
        if name == "all_gather":
            return self.inner.all_gather
        return object.__getattribute__(self, name)

    def start_all_reduce(self, x: Any) -> Any: ...
    def all_gather(self, x: Any) -> Any: ...
    def start_shift(self, x: Any, into: Any, by: int = 1) -> Any: ...
    def broadcast(self, x: Any, root: int = 0) -> None: ...


def gloo_threads() -> int:
    """gloo has one for every group that somebody still holds."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("gloo_tcp") for name in names)


def worker_error() -> tuple[str, int]:
    """An error on the worker thread comes out of backward with its own message, and close() does not hang.

    Nor does it leave a group behind, on whose closed sockets gloo's thread would spin.
    """
    model = make({})
    before = gloo_threads()
    handle = tersegrad.attach(model, "topk", network=_Broken)
    message = "nothing was raised"
    try:
        steps(model, 0, 50)
    except OSError as error:
        message = str(error)
    handle.close()
    return message, gloo_threads() - before


def unused_parameters() -> dict[str, Any]:
    model = make({"find_unused_parameters": True})
    handle = tersegrad.attach(model, "topk")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        loss(model, step, use_extra=step % 2 == 0).backward()
        optimizer.step()
    handle.close()
    return {"digest": digest(model), "finite": all(bool(p.isfinite().all()) for p in model.parameters())}


def overflow() -> dict[str, Any]:
    """An Inf in one gradient on one rank: all ranks see it, no bucket's memory changes, training goes on."""
    model = make({})
    handle = tersegrad.attach(model, "topk")
    steps(model, 0, 3)
    before = handle.state_dict()["tensors"]
    model.zero_grad()
    value = loss(model, 3)
    if dist.get_rank() == 1:
        model.module.last.weight.register_hook(lambda g: g.fill_(float("inf")))
    value.backward()
    seen = not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad)
    after = handle.state_dict()["tensors"]
    same = all(torch.equal(before[n]["residual"], after[n]["residual"]) for n in before)
    metrics = handle.metrics()
    handle.close()
    return {"seen": seen, "same": same, "nonfinite_steps": metrics["nonfinite_steps"]}


def on_a_subgroup() -> str:
    """A model on two of four ranks."""
    group, ours = dist.new_group([1, 3]), dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return "outside"
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, bucket_cap_mb=0.05)
    for wrong in (None, group):
        with pytest.raises(ValueError, match=r"torch\.distributed\.new_group"):
            tersegrad.attach(model, "topk", group=wrong)
    handle = tersegrad.attach(model, "topk", group=ours)
    steps(model, 0, 3)
    handle.close()
    return digest(model)


def two_models() -> list[str]:
    """Two attached models trained in turn in one process."""
    models = [make({}), make({"bucket_cap_mb": 0.2})]
    handles = [tersegrad.attach(m, spec) for m, spec in zip(models, ("topk", "bf16"), strict=True)]
    for step in range(4):
        for model in models:
            steps(model, step, 1)
    for handle in handles:
        handle.close()
    return [digest(m) for m in models]


def rng_after(spec: str) -> bool:
    """Dropout and data order draw the same numbers, compressed or not."""
    model = make({})
    torch.manual_seed(5)
    handle = tersegrad.attach(model, spec)
    steps(model, 0, 3)
    handle.close()
    drawn = torch.rand(4)
    torch.manual_seed(5)
    return torch.equal(drawn, torch.rand(4))


# ---- phases and sizes that users meet --------------------------------------------------------------


def in_phase(spec: str, before: int, after: int, bandwidth: str | None) -> dict[str, Any]:
    """Trains into a phase, saves, goes on; and resumes from what was saved with a new model and handle."""
    network = None if bandwidth is None else tersegrad.Throttled(bandwidth)
    model, handle = _attached(spec, network)
    steps(model, 0, before)
    sent = handle.metrics()["bytes_sent"]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = handle.state_dict()
    steps(model, before, after)
    metrics = handle.metrics()
    handle.close()
    resumed, handle = _attached(spec, network)
    resumed.load_state_dict(weights)
    handle.load_state_dict(saved)
    steps(resumed, before, after)
    handle.close()
    dense = metrics["dense_bytes"] / (before + after)
    return {
        "digest": digest(model),
        "resumed": digest(resumed),
        "ratio": dense * after / max(1, metrics["bytes_sent"] - sent),
        "layers": metrics["layers"],
    }


def in_phases(periods: dict[str, tuple[str, int]]) -> dict[str, bool]:
    """Whether a run that is resumed after so many steps ends as the one that went on, to the bit."""
    found = {}
    for name, (spec, before) in periods.items():
        result = in_phase(spec, before, 3, None)
        found[name] = result["digest"] == result["resumed"]
    return found


def _attached(spec: str, network: Any) -> tuple[DistributedDataParallel, tersegrad.Handle]:
    model = make({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, tersegrad.attach(model, spec, optimizer=optimizer, network=network)


def large(specs: list[str]) -> dict[str, dict[str, Any]]:
    """Each spec on a model with a bucket of more than 2^20 floats: replicas, and what was lost with fixed weights."""
    return {spec: _large(spec) for spec in specs}


def _large(spec: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 1200), nn.ReLU(), nn.Linear(1200, 1000), nn.ReLU(), nn.Linear(1000, 10))
    model = DistributedDataParallel(module)
    handle = tersegrad.attach(model, spec, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    sent, local = torch.zeros(2, sum(p.numel() for p in module.parameters()), dtype=torch.float64)
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x, y = torch.randn(4, 64, generator=generator), torch.randint(0, 10, (4,), generator=generator)
        own = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), list(module.parameters()))
        local += torch.cat([g.reshape(-1) for g in own]).double()
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        sent += torch.cat([p.grad.reshape(-1) for p in module.parameters()]).double()
    largest = max(sum(module.get_parameter(n).numel() for n in b) for b in handle.state_dict()["buckets"])
    same_means = _same_everywhere(sent)
    handle.flush()
    sent += torch.cat([p.grad.reshape(-1) for p in module.parameters()]).double()
    metrics = handle.metrics()
    handle.close()
    dist.all_reduce(local)
    total = local / dist.get_world_size()
    error = float((sent - total).abs().max() / total.abs().max())
    return {"same": same_means, "largest": largest, "error": error, "ratio": metrics["ratio"]}


def _same_everywhere(x: torch.Tensor) -> bool:
    high, low = x.clone(), x.clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    return torch.equal(high, low)
