"""Methods as the lab names them: one of our specs, ``none`` (plain DDP), or a hook of torch's own (``torch:...``)."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # as torch.distributed, which does not export it to type checkers
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tersegrad.comm.throttled import Throttled
from tersegrad.core import Reducer, needs_of, settled
from tersegrad.hosts.ddp import attach
from tersegrad.hosts.handle import Handle
from tersegrad.lab import torch_peers
from tersegrad.lab.workloads import Workload
from tersegrad.reducers import Dense
from tersegrad.specs import parse_reducer
from tersegrad.wrappers import MomentumCorrection

_TORCH = re.compile(r"torch:(?P<hook>\w+)(?:\((?P<arguments>[^()]*)\))?")
_PARAMETERS: dict[str, dict[str, float]] = {
    "noop": {},  # sends nothing, so that replicas drift apart: how long a step takes with no network at all
    "allreduce": {},  # what plain DDP does, as a hook: what any hook costs
    "fp16": {},
    "bf16": {},
    "powersgd": {"rank": 1, "start": 10},
    "topk": {"ratio": 0.01},  # these two are written in torch operations (torch_peers.py), not torch's own
    "dgc": {"ratio": 0.001},
}


@dataclass(frozen=True)
class Method:
    """A method that a run is made with."""

    text: str

    def __post_init__(self) -> None:
        self.reducer()
        self.torch_hook()

    @property
    def peer(self) -> bool:
        """Whether DDP or torch does the work, and we only watch."""
        return self.text == "none" or self.text.startswith("torch:")

    def reducer(self) -> Reducer | None:
        """Our reducer, if it is one of ours."""
        return None if self.peer else parse_reducer(self.text)

    def settled(self) -> "Method":
        """The method as it is once its beginning is over: what a short run should time."""
        reducer = self.reducer()
        return self if reducer is None or reducer == settled(reducer) else Method(repr(settled(reducer)))

    def adapt(self, workload: Workload) -> Workload:
        """The workload as this method needs it: a method with momentum takes the place of the optimizer's.

        Momentum applies a decay of w over and over, 1 / (1 - momentum) times in the end. Where it is applied before
        sending, the optimizer's decay has none, and gets that factor instead.
        """
        reducer = self.reducer()
        if reducer is None or not needs_of(reducer).no_momentum:
            return workload
        momenta = [part.momentum for part in reducer.walk() if isinstance(part, MomentumCorrection)]
        decay = workload.weight_decay / (1.0 - max(momenta, default=0.0))
        return replace(workload, momentum=0.0, weight_decay=decay)

    @property
    def expression(self) -> str:
        """What the method is, in full."""
        return self.text if self.peer else repr(self.reducer())

    def torch_hook(self) -> tuple[str, dict[str, float]] | None:
        """Name and parameters of a hook that is torch's own, or in torch operations alone."""
        if not self.text.startswith("torch:"):
            return None
        match = _TORCH.fullmatch(self.text)
        known = (
            "torch:noop, torch:allreduce, torch:fp16, torch:bf16, torch:powersgd(rank=2, start=10), "
            "torch:topk(ratio=0.01) and torch:dgc(ratio=0.001)"
        )
        if match is None or match["hook"] not in _PARAMETERS:
            raise ValueError(f"{self.text!r} is none of torch's hooks that the lab knows: {known}.")
        usual, given = _PARAMETERS[match["hook"]], dict[str, float]()
        for part in filter(None, (match["arguments"] or "").replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            if name not in usual or not _is_value(value, whole=type(usual[name]) is int):
                raise ValueError(f"{part!r} in {self.text!r}: the lab knows {known}.")
            given[name] = type(usual[name])(value)
        return match["hook"], usual | given

    def ddp_options(self) -> dict[str, Any]:
        """torch's PowerSGD hangs on gloo with more than one bucket, so it gets a single one."""
        return {"bucket_cap_mb": 4096} if self.text.startswith("torch:powersgd") else {}

    def install(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, link: Throttled | None, timeout: float
    ) -> Handle | None:
        """Puts the method on a model. A throttled link holds back our own communication only, so plain DDP becomes
        ``Dense()`` there, which sends the same bytes in the same pattern.
        """
        hook = self.torch_hook()
        if hook is not None:
            if link is not None:
                raise ValueError(f"{self.text} talks past an emulated link. Use --network netns, or our own hooks.")
            _register_torch_hook(model, *hook)
            return None
        reducer = self.reducer()
        if reducer is None and link is None:
            return None
        return attach(
            model, Dense() if reducer is None else reducer, network=link, timeout=timeout, optimizer=optimizer
        )


def _is_value(text: str, whole: bool) -> bool:
    """A whole number, or a share above 0 and at most 1."""
    if whole:
        return text.isdigit()
    return text.replace(".", "", 1).isdigit() and 0 < float(text) <= 1


def _register_torch_hook(model: DistributedDataParallel, name: str, parameters: dict[str, float]) -> None:
    if name == "noop":
        model.register_comm_hook(None, debugging_hooks.noop_hook)
    elif name == "allreduce":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "bf16":
        model.register_comm_hook(None, _half_hook)
    elif name in torch_peers.SELECTIONS:
        model.register_comm_hook(torch_peers.Peer(name, parameters["ratio"]), torch_peers.reduce_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=int(parameters["rank"]),
            start_powerSGD_iter=int(parameters["start"]),
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _half_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16 hook under another name: DDP refuses the original on a CPU by its name alone; gloo does not."""
    return default_hooks.bf16_compress_hook(group, bucket)
