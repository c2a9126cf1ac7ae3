"""The messages of one step: learning layers by ``learning``; coefficients, losses and all others in one vector."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tersegrad.core import Comm, Layout, State, Step, reduce, scratch, stage
from tersegrad.core import state as states
from tersegrad.reducers.gradiveq import pipeline
from tersegrad.reducers.gradiveq.layer import Layer, Run
from tersegrad.reducers.gradiveq.rest import Rest

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
        The mean over workers of what ``spec.opinions`` says of the layers whose loss is measured in this step.
    """
    rest = Rest(step.layout, coded + apart, x, out)
    if coded and spec.ring is not None:
        return pipeline.reduce_coded(spec, step, coded, rest, state, comm)
    own = scratch(state, "own", sum(layer.size for layer in coded), x.dtype, x.device)
    _encode(coded, own, state)
    inside = own[:0] if spec.codes_apart else own
    message = rest.pack([inside, own.new_tensor(spec.opinions(coded))], state)
    if message.numel():
        comm.all_reduce(message.div_(comm.size))
    mean, seen = rest.unpack(message)
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


def _encode(coded: list[Layer], own: Tensor, state: State) -> None:
    """Write the coefficients of every layer."""
    for run, (c,) in _each_run(coded, own):
        run.encode(c, state)


def _decode(coded: list[Layer], sent: Tensor, mean: Tensor, in_place: bool, state: State) -> None:
    """``out = U c + mu`` for the mean coefficients; ``x -= U c + mu`` for those that this worker sent."""
    for run, (own_c, mean_c) in _each_run(coded, sent, mean):
        if not in_place:
            run.decode(own_c, run.layer.x, state, subtract=True)
        run.decode(mean_c, run.layer.out, state)


def _each_run(coded: list[Layer], *vectors: Tensor) -> Iterator[tuple[Run, tuple[Tensor, ...]]]:
    """Every run of slices, with its part of each of the vectors."""
    runs = [run for layer in coded for run in layer.runs]
    sizes = [run.subspace.size for run in runs]
    yield from zip(runs, zip(*(vector.split(sizes) for vector in vectors), strict=True), strict=True)
