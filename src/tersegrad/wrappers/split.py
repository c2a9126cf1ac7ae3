"""What policies share: each parameter of a bucket goes to one of several reducers, packed with others of its kind."""

from abc import abstractmethod

import torch
from torch import Tensor

from tersegrad.core import Bucket, Comm, Reducer, State, scratch


class Split(Reducer):
    """A reducer made of reducers, each for some of the parameters."""

    @abstractmethod
    def parts(self) -> dict[str, Reducer]:
        """Every part by its key in the state, in the order in which all workers go through them."""

    @abstractmethod
    def part_of(self, name: str, shape: tuple[int, ...], numel: int) -> str:
        """The key of the part that a parameter belongs to."""

    @property
    def conserves(self) -> bool:
        """If all parts do."""
        return all(reducer.conserves for reducer in self.parts().values())

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """One state per part that has a tensor in this bucket."""
        keys = [self.part_of(*who) for who in zip(bucket.names, bucket.shapes, bucket.sizes, strict=True)]
        parts: State = {}
        for key, reducer in self.parts().items():
            if key in keys:
                part = bucket.subset([i for i, k in enumerate(keys) if k == key])
                parts[key] = {"names": list(part.names), "inner": reducer.init(part, comm)}
        return {"parts": parts}

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """Packs each part, reduces it, and puts it back in its places."""
        reducers = self.parts()
        for key, part_state in state["parts"].items():
            part = self._part(bucket, part_state)
            part_x = part.pack(x, part.room(x, part_state, "x"))
            part_out = part_x if out is x else part.room(out, part_state, "out")
            reducers[key].reduce(part.bucket, part_x, part_out, part_state["inner"], comm)
            part.unpack(part_out, out)
            if out is not x:
                part.unpack(part_x, x)

    def waiting(self, bucket: Bucket, state: State) -> Tensor | None:
        """What waits in the parts, each in its place."""
        reducers, found = self.parts(), None
        for key, part_state in state["parts"].items():
            part = self._part(bucket, part_state)
            waits = reducers[key].waiting(part.bucket, part_state["inner"])
            if waits is not None:
                if found is None:
                    found = scratch(state, "waiting", bucket.numel, waits.dtype, waits.device).zero_()
                part.put(waits, found)
        return found

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """Every part flushes its own."""
        reducers = self.parts()
        for key, part_state in state["parts"].items():
            part = self._part(bucket, part_state)
            part_out = part.pack(out, part.room(out, part_state, "out"))
            reducers[key].flush(part.bucket, part_out, part_state["inner"])
            part.unpack(part_out, out)

    def _part(self, bucket: Bucket, part_state: State) -> "_Part":
        """The part with all that the bucket knows about this step."""
        part: _Part = part_state.get("_part") or _Part(bucket, part_state["names"])
        part_state["_part"] = part
        part.bucket.step, part.bucket.lr = bucket.step, bucket.lr
        if bucket.squares is not None:
            part.bucket.squares = part.pack(bucket.squares, part.room(bucket.squares, part_state, "squares"))
        return part


class _Part:
    """Some tensors of a bucket, and where the stretches lie that they fill in it."""

    def __init__(self, bucket: Bucket, names: list[str]):
        members = [bucket.names.index(name) for name in names]
        self.bucket = bucket.subset(members)
        self.lengths: list[int] = []  # of stretches of the whole bucket, in turn outside and inside this part
        position = 0
        for i in members:
            if bucket.offsets[i] == position and self.lengths:
                self.lengths[-1] += bucket.sizes[i]
            else:
                self.lengths += [bucket.offsets[i] - position, bucket.sizes[i]]
            position = bucket.offsets[i + 1]
        self.lengths.append(bucket.numel - position)

    def room(self, whole: Tensor, state: State, key: str) -> Tensor:
        """Where this part of ``whole`` fits in one piece: a view where it is in one piece already."""
        stretches = self._stretches(whole)
        if len(stretches) == 1:
            return stretches[0]
        return scratch(state, key, self.bucket.numel, whole.dtype, whole.device)

    def pack(self, whole: Tensor, room: Tensor) -> Tensor:
        """Gathers the part; nothing to do for a view."""
        stretches = self._stretches(whole)
        return room if len(stretches) == 1 else torch.cat(stretches, out=room)

    def unpack(self, packed: Tensor, whole: Tensor) -> None:
        """Puts the part back; nothing to do for a view."""
        if len(self.lengths) > 3:
            self.put(packed, whole)

    def put(self, packed: Tensor, whole: Tensor) -> None:
        """Writes the part, wherever it comes from."""
        torch._foreach_copy_(list(self._stretches(whole)), packed.split(self.lengths[1::2]))

    def _stretches(self, whole: Tensor) -> tuple[Tensor, ...]:
        stretches: tuple[Tensor, ...] = whole.split(self.lengths)[1::2]
        return stretches
