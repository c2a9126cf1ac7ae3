"""What cannot work is refused at attach: what was asked, why it cannot be, and what to write instead."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tersegrad.core import Reducer, needs_of, why_uncompressed
from tersegrad.core.memory_format import shape_of
from tersegrad.core.signer import VARIABLE, shared_key
from tersegrad.engine.roll_call import has_frames
from tersegrad.hosts._compressible import compresses, means_to_compress
from tersegrad.reducers import Dense

_WIDE = (torch.float64, torch.complex128)


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


def require_gradients(spec: Reducer, model: DistributedDataParallel) -> None:
    """The gradients that the model will have can be reduced by this spec; says so where they are rounded for it."""
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            "this model was made with DDP(mixed_precision=...), which needs DDP's only communication hook itself. "
            "Leave mixed_precision out, and run forward and loss under torch.autocast."
        )
    if isinstance(spec, Dense):
        return  # as plain DDP: anything that can be all-reduced
    for prefix, module in model.module.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{prefix + '.' if prefix else ''}weight has sparse gradients (sparse=True), which {spec!r} cannot "
                'reduce. Make the module with sparse=False, or attach with the spec "none".'
            )
    wide = [n for n, p in model.module.named_parameters() if p.requires_grad and p.dtype in _WIDE]
    if wide and needs_of(spec).float32:
        warnings.warn(
            f"{wide[0]}{f' and {len(wide) - 1} more' if len(wide) > 1 else ''}: gradients in float64 are rounded to "
            f"float32 by {spec!r}, and values above 3.4e38 become infinite.",
            stacklevel=3,
        )


def warn_if_nothing_is_compressed(spec: Reducer, model: torch.nn.Module) -> None:
    """A spec that sends every parameter of this model uncompressed was hardly meant."""
    trained = {name: shape_of(p) for name, p in model.named_parameters() if p.requires_grad}
    if not means_to_compress(spec) or any(compresses(spec, name, shape) for name, shape in trained.items()):
        return
    dimensions = " or ".join(map(str, sorted({len(shape) for shape in trained.values()})))
    why = why_uncompressed(spec, list(trained.values())) or f"they have {dimensions} dimensions"
    warnings.warn(
        f"{spec!r} compresses no parameter of this model: {why}. All will travel uncompressed. `tersegrad list` says "
        "what each method is for.",
        stacklevel=3,
    )


def warn_of_unsigned_sums(spec: Reducer) -> None:
    """A shared key signs frames, and some methods have none."""
    if shared_key() and not has_frames(spec):
        warnings.warn(
            f"{VARIABLE} is set, and signs frames; {spec!r} sends sums, which have none: who can write to the links "
            "can change them. Methods that send frames: `topk`, `int8`, `qsgd` and others.",
            stacklevel=3,
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
        if needs.lookahead:
            raise ValueError(
                f"{spec!r} moves parameters as the optimizer would, and works with torch.optim.SGD. Write "
                "attach(model, ..., optimizer=optimizer)."
            )
        if needs.lr:
            raise ValueError(f"{spec!r} follows the learning rate. Write attach(model, ..., optimizer=optimizer).")
        if needs.no_momentum:
            raise ValueError(
                f"{spec!r} has momentum, and must know that the optimizer has none, or it would be applied twice. "
                "Write attach(model, ..., optimizer=optimizer), with torch.optim.SGD(..., momentum=0)."
            )
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
    if needs.no_momentum and any("betas" in group for group in optimizer.param_groups):
        raise ValueError(
            f"{spec!r} has momentum, and so has {type(optimizer).__name__}, which also divides by what it has seen of "
            "gradients' sizes. Use torch.optim.SGD(..., momentum=0), or a spec without momentum, e.g. 'topk4'."
        )
    twice = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
    if twice and needs.no_momentum:
        raise ValueError(
            f"{spec!r} has momentum, and so has the optimizer (momentum={twice}): it would be applied twice. Give "
            "the optimizer momentum=0, as the method's paper does."
        )
