"""What cannot work is refused at attach: what was asked, why it cannot be, and what to write instead."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tersegrad.core import Reducer, needs_of


def require_process_group() -> None:
    """torch.distributed must run."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "the process group is not initialised. Start the script with torchrun and call "
            'torch.distributed.init_process_group("gloo") before attach().'
        )


def require_ddp(model: Any) -> None:
    """The model must be a DDP model with its parameters on the CPU."""
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach() needs a DistributedDataParallel model, and this is a {type(model).__name__}. "
            "Write: model = DistributedDataParallel(model); tersegrad.attach(model, ...)."
        )
    devices = {p.device.type for p in model.parameters() if p.requires_grad}
    if devices - {"cpu"}:
        raise ValueError(
            f"the model's parameters are on {', '.join(sorted(devices))}. This version has only been run with "
            "parameters on the CPU and the gloo backend, so it refuses anything else."
        )


def require_strided(buffer: torch.Tensor, names: tuple[str, ...]) -> None:
    """What a hook is handed for sparse gradients cannot be compressed."""
    if buffer.layout != torch.strided:
        raise TypeError(
            f"the gradient of {', '.join(names)} is sparse, and is not reduced by this spec. Make its module with "
            'sparse=False, or attach with the spec "none".'
        )


def require_own_group(ranks_of: dist.ProcessGroup, group: dist.ProcessGroup | None) -> None:
    """A group for our use alone can be made here, or was given."""
    ranks = dist.get_process_group_ranks(ranks_of)
    if group is None and len(ranks) < dist.get_world_size():
        raise ValueError(
            f"the model lives on ranks {ranks} of {dist.get_world_size()}, and a process group can only be made by all "
            f"ranks together. Write on every rank: group = torch.distributed.new_group({ranks}, backend='gloo'); and "
            "where the model is: tersegrad.attach(model, ..., group=group)."
        )
    if group is not None and (group is ranks_of or dist.get_process_group_ranks(group) != ranks):
        raise ValueError(
            f"group must be a group of its own with the ranks of the model, {ranks}: collectives of two users in one "
            "group get mixed up. Make another one with torch.distributed.new_group."
        )


def require_optimizer(spec: Reducer, optimizer: torch.optim.Optimizer | None) -> None:
    """The optimizer is there where the spec needs it, and is one that the spec can work with."""
    needs = needs_of(spec)
    if optimizer is None:
        if needs.lr:
            raise ValueError(f"{spec!r} follows the learning rate. Write attach(model, ..., optimizer=optimizer).")
        return
    if needs.lookahead and not spec.needs().lookahead:
        raise ValueError(
            f"{spec!r}: a step ahead is made by all parameters, whatever is done with their gradients. "
            "Write StepAhead(...) around all the rest."
        )
    if needs.lookahead and not isinstance(optimizer, torch.optim.SGD):
        raise ValueError(
            f"{spec!r} moves parameters by (learning rate) * gradient, which is the step of torch.optim.SGD and not "
            f"of {type(optimizer).__name__}. Leave StepAhead out, and write what is inside it alone."
        )
    twice = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
    if twice and needs.no_momentum:
        raise ValueError(
            f"{spec!r} has momentum, and so has the optimizer (momentum={twice}): it would be applied twice. Give "
            "the optimizer momentum=0, as the method's paper does."
        )
