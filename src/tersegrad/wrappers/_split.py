"""Base of policies: each parameter of a bucket goes to one of several reducers, packed with others of its part."""

from abc import abstractmethod
from dataclasses import fields, replace

import torch
from torch import Tensor

from tersegrad.core import (
    Comm,
    Composite,
    Finish,
    Layout,
    Reducer,
    State,
    Step,
    Sum,
    Vector,
    contribution,
    phases,
    scratch,
)


class Split(Composite):
    """A reducer made of several reducers, each for some of the parameters."""

    @abstractmethod
    def parts(self) -> dict[str, Reducer]:
        """Every part by its key in the state, in the order in which all workers start them."""

    @abstractmethod
    def part_of(self, name: str, shape: tuple[int, ...], numel: int) -> str:
        """The key of the part that a parameter belongs to."""

    def loses(self, workers: int) -> float:
        """The loss of the part that loses most."""
        return max((reducer.loses(workers) for reducer in self.parts().values()), default=0.0)

    def init(self, layout: Layout, comm: Comm) -> State:
        """One state per part that has a tensor in this bucket."""
        keys = [self.part_of(*who) for who in zip(layout.names, layout.shapes, layout.sizes, strict=True)]
        parts: State = {}
        for key, reducer in self.parts().items():
            if key in keys:
                part = layout.subset([i for i, k in enumerate(keys) if k == key])
                parts[key] = {"names": list(part.names), "inner": reducer.init(part, comm)}
        return {"parts": parts}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Pack and start one part after the other; then wait for all of them, and unpack."""
        reducers = self.parts()
        packings = {key: self._packing(step.layout, memory) for key, memory in state["parts"].items()}
        if isinstance(x, Sum) and not all(packing.is_slice for packing in packings.values()):
            x = x.add()
        under_way = []
        for key, memory in state["parts"].items():
            packing = packings[key]
            squares = None if step.squares is None else packing.pack(step.squares, memory, "squares")
            part_x, part_out = packing.inputs(x, out, memory)
            part_step = step.on(packing.layout, squares)
            finish = reducers[key].start(part_step, part_x, part_out, memory["inner"], comm)
            under_way.append((packing, part_x, part_out, finish))

        def finish_all() -> bool | None:
            finite = [_finish_part(*part, x, out) for part in under_way]
            return None if None in finite else all(finite)

        return finish_all

    def residual(self, layout: Layout, state: State) -> Tensor | None:
        """The residuals of the parts, each in its place."""
        reducers, found = self.parts(), None
        for key, memory in state["parts"].items():
            packing = self._packing(layout, memory)
            residual = reducers[key].residual(packing.layout, memory["inner"])
            if residual is not None:
                if found is None:
                    found = scratch(state, "residual", layout.numel, residual.dtype, residual.device).zero_()
                packing.write(residual, found)
        return found

    def clear(self, layout: Layout, state: State) -> None:
        reducers = self.parts()
        for key, memory in state["parts"].items():
            reducers[key].clear(self._packing(layout, memory).layout, memory["inner"])

    def active(self, state: State | None, number: int) -> Reducer:
        """This policy with each reducer replaced by its own ``active``; itself if a state is given."""
        return self if state is not None else _with_active(self, number)

    @staticmethod
    def _packing(layout: Layout, memory: State) -> "_Packing":
        packing: _Packing = memory.get("_packing") or _Packing(layout, memory["names"])
        memory["_packing"] = packing
        return packing


def _with_active(policy: Split, number: int) -> Split:
    changed = {f.name: _active(getattr(policy, f.name), number) for f in fields(policy)}  # type: ignore[arg-type]
    return replace(policy, **changed)  # type: ignore[type-var]


def _active(value: object, number: int) -> object:
    if isinstance(value, dict):
        return {key: _active(child, number) for key, child in value.items()}
    return value.active(None, number) if isinstance(value, Reducer) else value


def _finish_part(
    packing: "_Packing", part_x: Vector, part_out: Tensor, finish: Finish, x: Vector, out: Tensor
) -> bool | None:
    finite = finish()
    packing.unpack(part_out, out)
    if isinstance(part_x, Tensor) and isinstance(x, Tensor) and out is not x:
        packing.unpack(part_x, x)
    return finite


class _Packing:
    """Some tensors of a bucket, and the slices of the bucket that they fill."""

    def __init__(self, layout: Layout, names: list[str]):
        members = [layout.names.index(name) for name in names]
        self.layout = layout.subset(members)
        self.lengths: list[int] = []  # of slices of the whole bucket, alternately outside and inside this part
        position = 0
        for i in members:
            if layout.offsets[i] == position and self.lengths:
                self.lengths[-1] += layout.sizes[i]
            else:
                self.lengths += [layout.offsets[i] - position, layout.sizes[i]]
            position = layout.offsets[i + 1]
        self.lengths.append(layout.numel - position)

    @property
    def is_slice(self) -> bool:
        """Whether the tensors are contiguous, so that no packing is needed."""
        return len(self.lengths) <= 3

    def inputs(self, x: Vector, out: Tensor, memory: State) -> tuple[Vector, Tensor]:
        """This part of ``x``, packed, and a buffer for its mean."""
        if isinstance(x, Sum):
            return Sum(*(self._slices(v)[0] for v in (x.a, x.b, x.total))), self._slices(out)[0]
        part_x = self.pack(x, memory, "x")
        return part_x, part_x if out is x else self._buffer(out, memory, "out")

    def pack(self, whole: Tensor, memory: State, key: str) -> Tensor:
        """Gather the part into scratch; a view if it is one slice."""
        slices = self._slices(whole)
        return slices[0] if self.is_slice else torch.cat(slices, out=self._buffer(whole, memory, key))

    def _buffer(self, whole: Tensor, memory: State, key: str) -> Tensor:
        if self.is_slice:
            return self._slices(whole)[0]
        return scratch(memory, key, self.layout.numel, whole.dtype, whole.device)

    def unpack(self, packed: Tensor, whole: Tensor) -> None:
        """Copy the part back into the bucket; nothing to do for a view."""
        if not self.is_slice:
            self.write(packed, whole)

    def write(self, packed: Tensor, whole: Tensor) -> None:
        """Write the part into its slices of the bucket."""
        torch._foreach_copy_(list(self._slices(whole)), packed.split(self.lengths[1::2]))

    def _slices(self, whole: Tensor) -> tuple[Tensor, ...]:
        slices: tuple[Tensor, ...] = whole.split(self.lengths)[1::2]
        return slices


@contribution.register
def _contribution(reducer: Split, layout: Layout, state: State, x: Tensor, workers: int) -> Tensor:
    """The contributions of all parts, each in its place."""
    reducers, found = reducer.parts(), x.clone()
    for key, memory in state["parts"].items():
        packing = reducer._packing(layout, memory)
        part = packing.pack(x, {}, "x").clone()
        packing.write(contribution(reducers[key], packing.layout, memory["inner"], part, workers), found)
    return found


@phases.register
def _phases(reducer: Split) -> list[Reducer]:
    """The phases of each part: the policy itself adds no kernels."""
    return [phase for part in reducer.parts().values() for phase in phases(part)]
