"""The messages of one step: learning layers by ``learning``; coefficients, losses and all others in one vector."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tersegrad.core import Comm, Layout, State, Step, reduce, scratch, stage
from tersegrad.core import state as states
from tersegrad.reducers.gradiveq.layer import Layer

if TYPE_CHECKING:
    from tersegrad.reducers.gradiveq import GradiVeQ


def reduce_learners(
    spec: "GradiVeQ", step: Step, learners: list[Layer], x: Tensor, out: Tensor, state: State, comm: Comm
) -> None:
    """Reduce the layers that learn, with ``learning``."""
    part = step.layout.subset([layer.place for layer in learners])
    memory = _learning_memory(spec, step.layout, part, state, comm)
    packed = scratch(state, "learning_x", part.numel, x.dtype, x.device)
    torch.cat([layer.x for layer in learners], out=packed)
    mean = packed if out is x else scratch(state, "learning_out", part.numel, x.dtype, x.device)
    reduce(spec.learning, step.on(part), packed, mean, memory["inner"], comm)
    if out is not x:
        torch._foreach_copy_([layer.x for layer in learners], packed.split(part.sizes))
    torch._foreach_copy_([layer.out for layer in learners], mean.split(part.sizes))


def _learning_memory(spec: "GradiVeQ", layout: Layout, part: Layout, state: State, comm: Comm) -> State:
    """The state of ``learning`` for the layers that learn now; split and merged again if the set has changed."""
    memory: State = state["learning"]
    names = list(part.names)
    if memory["names"] != names:
        before = layout.subset([layout.names.index(name) for name in memory["names"]])
        pieces = states.split(memory, before)
        memory = {"names": names, "inner": spec.learning.init(part, comm)}
        states.merge(pieces, memory, part)
        stage(state, learning=memory)
    return memory


def reduce_packed(
    spec: "GradiVeQ",
    step: Step,
    coded: list[Layer],
    apart: list[Layer],
    x: Tensor,
    out: Tensor,
    state: State,
    comm: Comm,
) -> list[float]:
    """Reduce everything but the layers that are sent separately, packed into one vector.

    Returns:
        The mean over workers of the losses of those layers whose loss is measured in this step.
    """
    slices = _outside(step.layout, {layer.place for layer in coded + apart})
    own = scratch(state, "own", sum(layer.subspace.size for layer in coded), x.dtype, x.device)
    losses = _encode(spec, coded, own, state)
    lengths = [end - start for start, end in slices]
    inside = own[:0] if spec.codes_apart else own
    message = scratch(state, "message", sum(lengths) + inside.numel() + len(losses), x.dtype, x.device)
    torch.cat([*(x[start:end] for start, end in slices), inside, own.new_tensor(losses)], out=message)
    if message.numel():
        comm.all_reduce(message.div_(comm.size))
    *dense, mean, seen = message.split([*lengths, inside.numel(), len(losses)])
    for (start, end), part in zip(slices, dense, strict=True):
        if out is not x:
            x[start:end].zero_()
        out[start:end].copy_(part)
    if coded and spec.codes_apart:
        own, mean = _reduce_coefficients(spec, step, own, out is x, state, comm)
    _decode(coded, own, mean, out is x, state)
    found: list[float] = seen.tolist()
    return found


def _reduce_coefficients(
    spec: "GradiVeQ", step: Step, own: Tensor, in_place: bool, state: State, comm: Comm
) -> tuple[Tensor, Tensor]:
    """The coefficients that this worker sent, and their mean over workers."""
    memory = state["coefficients"]
    virtual: Layout | None = memory.get("_layout")
    if virtual is None or virtual.numel != own.numel():
        states.drop_scratch(memory)  # it has the size of another number of coefficients
        name = f"coefficients of {step.layout.id}"
        virtual = memory["_layout"] = Layout((name,), ((own.numel(),),), step.layout.seed, step.layout.device)
    rest = scratch(state, "rest", own.numel(), own.dtype, own.device).copy_(own)
    mean = rest if in_place else scratch(state, "mean", own.numel(), own.dtype, own.device)
    reduce(spec.coefficients, step.on(virtual), rest, mean, memory, comm)
    return own if in_place else own.sub_(rest), mean


def _encode(spec: "GradiVeQ", coded: list[Layer], own: Tensor, state: State) -> list[float]:
    """Write the coefficients of every layer; return the losses that are measured in this step."""
    losses = []
    for layer, c in zip(coded, own.split([layer.subspace.size for layer in coded]), strict=True):
        slices = layer.split(layer.x, state)
        layer.subspace.encode(slices, c)
        if spec.looks(layer):
            losses.append(layer.subspace.local_loss(slices, c))
    return losses


def _decode(coded: list[Layer], sent: Tensor, mean: Tensor, in_place: bool, state: State) -> None:
    """``out = U c + mu`` for the mean coefficients; ``x -= U c + mu`` for those that this worker sent."""
    sizes = [layer.subspace.size for layer in coded]
    for layer, own_c, mean_c in zip(coded, sent.split(sizes), mean.split(sizes), strict=True):
        if not in_place:
            layer.join(own_c, layer.x, state, subtract=True)
        layer.join(mean_c, layer.out, state)


def _outside(layout: Layout, members: set[int]) -> list[tuple[int, int]]:
    """Start and stop of the slices of a bucket between the members."""
    slices: list[tuple[int, int]] = []
    for i, (start, end) in enumerate(zip(layout.offsets, layout.offsets[1:], strict=False)):
        if i in members:
            continue
        if slices and slices[-1][1] == start:
            slices[-1] = (slices[-1][0], end)
        else:
            slices.append((start, end))
    return slices
