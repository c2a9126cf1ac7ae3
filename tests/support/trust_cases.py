"""What runs inside the gloo worker processes of test_trust.py: lost data, ranks that differ, types of errors."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from support.ddp_cases import digest, loss, make, steps
from tersegrad.comm import frame as frames
from tersegrad.core import Comm, Signer
from tersegrad.engine.roll_call import EVERY, FIRST
from tersegrad.testing.runs import same


def said_by(function: Callable[[], Any]) -> str:
    """The type and the text of what a function raises."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---- nothing is lost -----------------------------------------------------------------------------


class Experts(nn.Module):
    """A part that all use, one that is used in every tenth step, and one that a single rank uses in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rare, self.mine = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor, step: int) -> Tensor:
        out: Tensor = self.often(x)
        if step % 10 == 0:
            out = out + self.rare(x)
        if step % dist.get_world_size() == dist.get_rank():
            out = out + self.mine(x)
        return out


def experts(specs: list[str], count: int) -> dict[str, dict[str, Any]]:
    return {spec: _experts(spec, count) for spec in specs}


def _experts(spec: str, count: int) -> dict[str, Any]:
    """Fixed weights: sum of ``.grad`` + flush - sum of gradients, relative; and whether idle tensors keep their state.

    Without flush the same, so that what was sent is known.
    """
    torch.manual_seed(0)
    net = Experts()
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.001)
    handle = tersegrad.attach(model, spec, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    want = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    got = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    kept = True
    for step in range(count):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
        used = torch.autograd.grad(net(x, step).square().mean(), list(net.parameters()), allow_unused=True)
        for total, gradient in zip(want.values(), used, strict=True):
            total += 0 if gradient is None else gradient
        before = handle.state_dict()["tensors"]
        model.zero_grad()
        model(x, step).square().mean().backward()
        for name, p in net.named_parameters():
            got[name] += 0 if p.grad is None else p.grad
        if step % 10 and step > 1:  # in the first steps there is no state, or another
            after = handle.state_dict()["tensors"]
            kept = kept and all(_kept(before[name], after[name]) for name in before if name.startswith("rare"))
    model.zero_grad()
    handle.flush()
    for name, p in net.named_parameters():
        got[name] += p.grad
    handle.close()
    worst = {}
    for name, total in want.items():
        dist.all_reduce(total)
        mean = total / dist.get_world_size()
        worst[name] = float((got[name] - mean).norm() / mean.norm())
    return {"worst": max(worst.values()), "kept": kept, "by_name": worst}


def _kept(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether what a tensor's state remembers per element, or of this tensor alone, is what it was."""
    for key, value in before.items():
        if isinstance(value, dict) and not _kept(value, after[key]):
            return False
        if key in ("residual", "velocity", "variance", "frame", "momentum", "q") and not torch.equal(value, after[key]):
            return False
    return True


def flush_under_a_scaler() -> dict[str, float]:
    """What flush leaves is applied by ``scaler.step`` as a gradient of backward is."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 40))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    handle = tersegrad.attach(model, "topk", scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    saved = {name: piece["residual"].clone() for name, piece in handle.state_dict()["tensors"].items()}
    optimizer.zero_grad()
    handle.flush()
    weight = model.module.weight.detach()
    before = weight.clone()
    scaler.step(optimizer)
    scaler.update()
    late = saved["weight"]
    dist.all_reduce(late)
    late = (late / dist.get_world_size()).view_as(weight)
    left = handle.metrics()["residual_norm"]
    handle.close()
    return {"late": float(late.norm()), "off": float((before - weight - late).norm()), "left": left}


def clipped(spec: str | None) -> Tensor:
    """Mixed precision with a norm limit, in the right order: backward, unscale_, clip, step; all weights after it."""
    model = make({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    handle = None if spec is None else tersegrad.attach(model, spec, scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(model, step)).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert float(norm) > 0.1, "nothing was clipped"
        scaler.step(optimizer)
        scaler.update()
    if handle is not None:
        handle.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def clipping() -> dict[str, float]:
    plain = clipped(None)
    exact = clipped("ErrorFeedback(AllGather(Identity()))")
    late = clipped("ErrorFeedback(AllGather(TopK(0.5)))")
    start = torch.cat([p.detach().flatten() for p in make({}).parameters()])
    return {
        "exact": float((plain - exact).abs().max()),
        "step": float((plain - start).norm()),
        "sparse step": float((late - start).norm()),
    }


# ---- ranks that differ ---------------------------------------------------------------------------


def arguments() -> dict[str, str]:
    """Each argument of attach, different on rank 2 only."""
    model, odd = make({}), dist.get_rank() == 2
    sgd = torch.optim.SGD(model.parameters(), lr=0.2 if odd else 0.1)
    by_lr = "Schedule(ErrorFeedback(AllReduce(RandomK(0.1))), 'ratio', smoothness=1.0)"
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "seed": ("randomk", {"seed": 7 if odd else 0}),
        "nonfinite": ("topk", {"nonfinite": "skip" if odd else "propagate"}),
        "scaler": ("none", {"scaler": torch.amp.GradScaler("cpu") if odd else None}),
        "check_replicas": ("topk", {"check_replicas": 5 if odd else None}),
        "spec": ("bf16" if odd else "topk", {}),
        "learning rate": (by_lr, {"optimizer": sgd}),
    }
    said = {key: said_by(partial(tersegrad.attach, model, spec, **how)) for key, (spec, how) in cases.items()}
    other = make({"find_unused_parameters": odd})
    said["find_unused_parameters"] = said_by(lambda: tersegrad.attach(other, "topk"))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = nn.Sequential() if not odd else nn.Module()
    names.add_module("0" if not odd else "other", net)
    if odd:
        names.forward = net.forward  # type: ignore[method-assign]
    renamed = DistributedDataParallel(names)
    said["names"] = said_by(lambda: tersegrad.attach(renamed, "topk"))
    handle = tersegrad.attach(model, "topk")  # nothing is left of all this
    steps(model, 0, 1)
    handle.close()
    return said


def states(spec: str) -> dict[str, Any]:
    """States of other steps, of another run, one that does not fit on one rank; then all is as it was."""
    model, odd = make({}), dist.get_rank() == 2
    handle = tersegrad.attach(model, spec, seed=1)
    steps(model, 0, 2)
    early = handle.state_dict()
    steps(model, 2, 2)
    late = handle.state_dict()
    another = {**late, "run": "0123456789abcdef"}
    misfit = {**late, "spec": "Other()"}
    found: dict[str, Any] = {
        "step": said_by(lambda: handle.load_state_dict(early if odd else late)),
        "run": said_by(lambda: handle.load_state_dict(another if odd else late)),
        "misfit": said_by(lambda: handle.load_state_dict(misfit if odd else late)),
    }
    found["kept"] = same(handle.state_dict(), late)
    handle.load_state_dict(early)
    found["loaded"] = handle.state_dict()["step"] == 2 and handle.state_dict()["run"] == early["run"]
    steps(model, 2, 1)
    handle.close()
    found["digest"] = digest(model)
    return found


def loaded_alone(spec: str) -> str:
    """Rank 2 loads, and the others go on."""
    model = make({})
    handle = tersegrad.attach(model, spec, timeout=20.0)
    peers = handle._engine._peers
    peers._options = replace(peers._options, timeout=2.0)  # for loading only: a busy machine may be slow in a step
    steps(model, 0, 2)
    early = handle.state_dict()
    steps(model, 2, 2)

    def go_on() -> None:
        if dist.get_rank() == 2:
            handle.load_state_dict(early)
        steps(model, 4, 2)

    said = said_by(go_on)
    handle.close()
    return said


SUMS = {
    "none": 5,  # goes straight to the group from the fourth step on
    "bf16": 2,
    "powersgd": 10,
    "randomk": 2,
    "GradiVeQ(warmup=0, learn=3, compress=9, worst=None, tiny=0)": 14,
    "Every(Dense(), n=2)": 2,
}


def noticed_in(step: int) -> int:
    """The step in which the roll is called next."""
    return step if step < FIRST else -(-(step + 1) // EVERY) * EVERY - 1


def out_of_step() -> dict[str, str]:
    """Rank 2 counts one step more than the others; methods whose sums have no frame."""
    said = {}
    for spec, before in SUMS.items():
        model = make({})
        handle = tersegrad.attach(model, spec, timeout=20.0)
        steps(model, 0, before)
        handle._engine._step += dist.get_rank() == 2
        said[spec] = said_by(partial(steps, model, before, EVERY))
        handle.close()
    return said


def other_learning_rate() -> dict[str, str]:
    """The learning rate changes on rank 2 only, in the third step: lengths would differ, on which gloo aborts."""
    model = make({})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = "Schedule(ErrorFeedback(AllReduce(RandomK(0.01))), 'ratio', smoothness=5.0)"
    handle = tersegrad.attach(model, spec, optimizer=sgd, timeout=20.0)
    steps(model, 0, 2)
    sgd.param_groups[0]["lr"] = 0.02 if dist.get_rank() == 2 else 0.1
    said = said_by(lambda: steps(model, 2, 1))
    handle.close()
    return {"said": said}


# ---- errors that a program can catch -------------------------------------------------------------


def nonfinite_is_caught(spec: str) -> dict[str, Any]:
    """``except FloatingPointError`` around backward, and training goes on."""
    model = make({})
    handle = tersegrad.attach(model, spec, nonfinite="raise")
    steps(model, 0, 4)
    hook = model.module.last.bias.register_hook(lambda g: g * (torch.nan if dist.get_rank() == 1 else 1.0))
    caught = ""
    try:
        loss(model, 4).backward()
    except FloatingPointError as error:
        caught = str(error)
    hook.remove()
    losses = steps(model, 5, 2)
    counted = handle.metrics()["nonfinite_steps"]
    handle.close()
    return {"caught": caught, "losses": losses, "counted": counted, "digest": digest(model)}


class Liar(Comm):
    """From its third frame on, rank 2 sends bodies that do not decode, and seals them again."""

    def __init__(self, inner: Comm):
        self.inner, self.rank, self.size, self.count = inner, inner.rank, inner.size, 0

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Any:
        self.count += 1
        if self.rank == 2 and self.count > 9:
            x = x.clone()
            header = frames.read_header(x, 2)
            meta = x[64 : 64 + header.meta].view(torch.int64)
            meta[0] = 1 << 62  # so many elements were sent
            head = x[:56].numpy().tobytes()
            checksum = frames._checksum(head, x)
            x[56:64] = torch.frombuffer(bytearray(checksum.to_bytes(8, "little")), dtype=torch.uint8)
        return self.inner.start_shift(x, into, by)

    def start_all_reduce(self, x: Tensor) -> Any:
        return self.inner.start_all_reduce(x)

    def all_gather(self, x: Tensor) -> Any:
        return self.inner.all_gather(x)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        self.inner.broadcast(x, root)


def bad_body(spec: str) -> dict[str, str]:
    """A body that cannot be decoded: who sent it, and the type of the error."""
    model = make({})
    handle = tersegrad.attach(model, spec, network=Liar, timeout=20.0)
    caught = ""
    try:
        steps(model, 0, 6)
    except tersegrad.FrameError as error:
        caught = str(error)
    except tersegrad.NetworkError:  # the liar itself is told what the others say
        caught = "told by others"
    handle.close()
    return {"caught": caught}


def replicas_are_caught() -> str:
    model = make({})
    handle = tersegrad.attach(model, "topk", check_replicas=1)
    with torch.no_grad():
        model.module.last.bias[0] += dist.get_rank() // 2  # two against two
    caught = ""
    try:
        steps(model, 0, 1)
    except tersegrad.ReplicasDifferError as error:
        caught = str(error)
    handle.close()
    return caught


def lost_in_a_subgroup() -> str:
    """A model on ranks 1 and 3, of which 3 stops coming; the group itself would wait for minutes."""
    ranks = [1, 3]
    for_ddp, ours = (dist.new_group(ranks, timeout=timedelta(seconds=80)) for _ in range(2))
    if dist.get_rank() not in ranks:
        return "outside"
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(9, 9), process_group=for_ddp)
    handle = tersegrad.attach(model, "topk", group=ours, timeout=4.0)
    dist.barrier(for_ddp)
    for _ in range(3):
        model(torch.randn(3, 9)).sum().backward()
    said = ""
    if dist.get_rank() == 1:
        try:
            model(torch.randn(3, 9)).sum().backward()
        except tersegrad.NetworkError as error:
            said = str(error)
    dist.barrier(for_ddp)  # rank 3 is here all the time, and its other threads answer
    handle.close()
    return said


def no_bucket() -> str:
    """What ``optimize_ddp="python_reducer"`` hands to the hook: a gradient and its parameter."""
    model = make({})
    handle = tersegrad.attach(model, "topk")
    hook, state = model._comm_hooks[0]
    said = said_by(lambda: hook(state, (model.module.last.weight, model.module.last.weight)))
    handle.close()
    return said


# ---- kinds of gradients, parameters and optimizers -----------------------------------------------


class Projection(nn.Module):
    """Numbers of any dtype."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(30, 40, dtype=dtype)), nn.Parameter(torch.randn(40))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs().float() + self.bias


def dtypes(specs: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Sum of means + flush - sum of gradients, relative, for unusual dtypes; and what attach warned of."""
    kinds = ("complex64", "float64", "bfloat16")
    return {(kind, spec): _of_dtype(getattr(torch, kind), spec) for kind in kinds for spec in specs}


def _of_dtype(dtype: torch.dtype, spec: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Projection(dtype)
    model = DistributedDataParallel(net)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        handle = tersegrad.attach(model, spec)
    got, want = torch.zeros_like(net.weight), torch.zeros_like(net.weight)
    for step in range(3):
        model.zero_grad()
        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        want += torch.autograd.grad(net(x).square().mean(), net.weight)[0]
        model(x).square().mean().backward()
        got += net.weight.grad
    handle.load_state_dict(handle.state_dict())
    handle.flush()
    got += net.weight.grad
    handle.close()
    mean = torch.view_as_real(want) if want.is_complex() else want
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    error = float((got - want).abs().max() / want.abs().max())
    return {"error": error, "warned": [str(w.message) for w in warned]}


def refusals() -> dict[str, str]:
    """What attach refuses or warns of, about gradients and optimizers."""
    model = make({})
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)))
    flat = DistributedDataParallel(nn.Linear(9, 9))
    parameters = list(model.parameters())
    adam, heavy = torch.optim.Adam(parameters), torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    said = {
        "sparse": said_by(lambda: tersegrad.attach(sparse, "topk")),
        "dgc alone": said_by(lambda: tersegrad.attach(model, "dgc")),
        "dgc adam": said_by(lambda: tersegrad.attach(model, "dgc", optimizer=adam)),
        "signum momentum": said_by(lambda: tersegrad.attach(model, "signum", optimizer=heavy)),
        "ahead alone": said_by(lambda: tersegrad.attach(model, "ahead")),
    }
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tersegrad.attach(flat, "gradiveq").close()
    said["gradiveq"] = "; ".join(str(w.message) for w in warned)
    handle = tersegrad.attach(sparse, "none")
    for _ in range(5):
        sparse(torch.tensor([dist.get_rank()])).sum().backward()
    handle.close()
    said["sparse with none"] = f"{sparse.module[0].weight.grad.to_dense().sum(1).tolist()}"
    return said


def frozen_or_ignored(spec: str) -> dict[str, Any]:
    """Parameters frozen between DDP() and attach(), and such that DDP ignores: load, flush, and go on."""
    found = {}
    for case in ("frozen", "ignored"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
        if case == "ignored":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
        model = DistributedDataParallel(net, find_unused_parameters=True)
        if case == "frozen":
            net[0].weight.requires_grad_(False)
        handle = tersegrad.attach(model, spec)
        for _ in range(2):
            model(torch.ones(3, 9)).sum().backward()
        handle.load_state_dict(handle.state_dict())
        model(torch.ones(3, 9)).sum().backward()
        handle.flush()
        found[case] = sorted(handle.state_dict()["tensors"])
        handle.close()
    return found


# ---- a shared key --------------------------------------------------------------------------------


@contextmanager
def key(text: str) -> Iterator[None]:
    """The environment of a process that was started with this key."""
    os.environ["TERSEGRAD_KEY"] = text
    try:
        yield
    finally:
        del os.environ["TERSEGRAD_KEY"]


def signed(specs: list[str]) -> dict[str, Any]:
    """Training with a key ends as without; a rank with another one, or with none, does not begin."""
    found: dict[str, Any] = {}
    for spec in specs:
        digests = []
        for secret in ("", "a key that all ranks were given"):
            model = make({})
            with key(secret):
                handle = tersegrad.attach(model, spec, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
            assert bool(handle._engine._comm.signer) == bool(secret)
            steps(model, 0, 3)
            handle.close()
            digests.append(digest(model))
        found[spec] = digests[0] == digests[1]
    model, odd = make({}), dist.get_rank() == 2
    with key("another key, of rank 2" if odd else "a key that all ranks were given"):
        found["another"] = said_by(lambda: tersegrad.attach(model, "topk"))
    with key("" if odd else "a key that all ranks were given"):
        found["none"] = said_by(lambda: tersegrad.attach(model, "topk"))
    with key("too short"):
        found["short"] = said_by(lambda: tersegrad.attach(model, "topk"))
    with key("a key that all ranks were given"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tersegrad.attach(model, "powersgd").close()
    found["sums"] = "; ".join(str(w.message) for w in warned)
    return found


class Stranger(Comm):
    """Rank 2's link is in the hands of somebody without the key, who changes its messages from the tenth on."""

    how = ""

    def __init__(self, inner: Comm):
        self.inner, self.rank, self.size, self.count = inner, inner.rank, inner.size, 0
        self.before: list[Tensor] = []

    @property
    def signer(self) -> Signer:
        return self.inner.signer

    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Any:
        self.count += 1
        if self.rank == 2:
            self.before.append(x.clone())
        if self.rank == 2 and self.count > 9:
            x = self._changed(x.clone())
        return self.inner.start_shift(x, into, by)

    def _changed(self, x: Tensor) -> Tensor:
        if self.how == "replayed":  # the same bucket of an earlier step, with the number of this one
            bucket = bytes(x[32:40].tolist())
            old = next(frame.clone() for frame in self.before if bytes(frame[32:40].tolist()) == bucket)
            old[24:32] = x[24:32]
            x = old
        else:
            x[-1] += 1
        head = x[:56].numpy().tobytes()
        checksum = frames._checksum(head, x)
        x[56:64] = torch.frombuffer(bytearray(checksum.to_bytes(8, "little")), dtype=torch.uint8)
        return x

    def start_all_reduce(self, x: Tensor) -> Any:
        return self.inner.start_all_reduce(x)

    def all_gather(self, x: Tensor) -> Any:
        return self.inner.all_gather(x)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        self.inner.broadcast(x, root)


def strangers(how: str, secret: str) -> str:
    """Frames that were changed or replayed on the way, and given a right checksum."""
    Stranger.how = how
    model = make({"bucket_cap_mb": 25})
    with key(secret):
        handle = tersegrad.attach(model, "topk", network=Stranger, timeout=20.0)
    said = said_by(lambda: steps(model, 0, 6))
    handle.close()
    return said
