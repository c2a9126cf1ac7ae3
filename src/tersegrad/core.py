"""The five nouns and the one law; this docstring is the specification that everything else obeys.

**Payload**: what one worker puts on the wire for one bucket. Bytes, and the length of the vector they stand for.

**Compressor**: a codec for *one* flat float32 vector. It talks to nobody and owns no memory.

- ``init(bucket, seed)`` gives a fresh state.
- ``encode(x, state)`` gives a payload, valid until the next ``encode`` with the same state. It does not change ``x``.
  ``encode_sum(a, b, total, state)`` makes ``total = a + b`` first, in the same pass where a method can.
- ``accumulate(payload, acc, scale)`` does ``acc += scale * decoded(payload)`` and needs nothing but the payload.
  Summing N workers' payloads, decoding one (on zeros) and taking one's own out again (``scale=-1``) are this one call.
- ``accumulator(out, state)`` and ``finish(acc, out, state)`` let a method sum in another domain (a spectrum) and
  come back once. By default the sum is made in ``out`` itself.
- ``sum_decoded(payloads, scale, out, state)`` is all of that for all workers' payloads at once; a method may have a
  quicker way to the same bits.

**Bucket**: one contiguous gradient buffer and who lives in it; and what the caller knows about this step: its number,
the learning rate, and the sum over samples of squared gradients, for reducers that ask for it (``squares``).

**Comm**: the only way out of the process.

**Reducer**: how N workers turn N buckets into one mean. ``reduce(bucket, x, out, state, comm)`` blocks, writes the mean
into ``out`` (the same bits on every worker) and leaves in ``x`` what was not sent. The law:

    mean over workers of (x before - x after) == out

A reducer with a memory obeys it with the memory counted in: what left ``x`` and was not sent is in its state. A reducer
that throws something away on purpose says so with ``conserves = False``. ``out`` may be the very tensor ``x``: then the
caller does not want the rest, and nothing is left.

``start`` is ``reduce`` in two parts, for callers with several buckets: the second part, a function that it returns,
waits and sends nothing. So all workers send in the order in which buckets are started, whenever each of them finishes.
``start_sum`` is ``start`` for a vector that has yet to be added up. The second part says whether ``out`` is finite, if
it happens to know: a method that has touched a hundredth of ``out`` spares its caller a look at all of it.

If any worker's ``x`` holds a NaN or an infinity, ``out`` is non-finite on every worker and ``x`` is unspecified.

**State** is a plain dict of tensors, numbers and states, owned by the caller. Its rules:

- ``reduce`` and ``encode`` do not change what is saved. What shall be otherwise after this step is noted with
  ``later``; the caller then settles the step (``state.settle``): kept if ``out`` is finite, forgotten if not. As all
  workers see the same ``out``, they decide alike with no further message, and a step with a NaN in any of its buckets
  leaves no trace.
- Keys that begin with ``_`` are scratch: never saved, may be dropped at any time between two steps.
- A tensor in the state of several tensors' bucket is flat and has one entry per element of the bucket.
- A nested state that covers only some of the bucket's tensors lists them under ``names``. In a state that covers a
  single tensor, tensors may have any shape.
- A number belongs to the bucket.

So a state can be cut by tensor name and joined in another order (``state.py``), whatever the method.

Compressors and reducers are *specs*: frozen dataclasses whose ``repr`` is the expression that makes them.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from tersegrad import kernels

State = dict[str, Any]
Finish = Callable[[], bool | None]  # the second part of a reduce: whether ``out`` is finite, None if nobody looked

HEADER_NBYTES = (
    56  # room in front of every payload's body for the frame header (wire.py), so that framing copies nothing
)


class Spec:
    """Base of everything that is written as a constructor expression: ``parse(repr(spec)) == spec``."""

    examples: ClassVar[
        tuple[str, ...]
    ] = ()  # expressions that the laws are run on; default: the class with no argument

    def __repr__(self) -> str:
        return self._expression(with_defaults=False)

    def fingerprint(self) -> int:
        """64 bits that name this spec with all its parameters, defaults included."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> int:  # every frame has it, and a spec never changes
        digest = hashlib.blake2b(self._expression(with_defaults=True).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def walk(self) -> "Iterator[Spec]":
        """This spec and every spec inside it, outermost first."""
        yield self
        for f in fields(self):  # type: ignore[arg-type]  # every final subclass is a dataclass
            value = getattr(self, f.name)
            for child in value.values() if isinstance(value, dict) else (value,):
                if isinstance(child, Spec):
                    yield from child.walk()

    def _expression(self, with_defaults: bool) -> str:
        parts = []
        leading = True  # a nested spec in front is written without its field's name
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            leading = leading and isinstance(value, Spec | dict)
            if value == default and not with_defaults:
                leading = False
                continue
            text = _literal(value, with_defaults)
            parts.append(text if leading else f"{f.name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"


def _literal(value: Any, with_defaults: bool) -> str:
    if isinstance(value, Spec):
        return value._expression(with_defaults)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_literal(v, with_defaults)}" for k, v in value.items()) + "}"
    return repr(value)


@dataclass
class Bucket:
    """One contiguous gradient buffer: the tensors in it, in order, and the step it is being reduced for.

    >>> b = Bucket(("w", "b"), ((2, 3), (3,)))
    >>> b.numel, b.offsets
    (9, (0, 6, 9))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    step: int = 0  # set by the caller before every reduce
    seed: int = 0  # all randomness comes from (seed, step, bucket)
    lr: float | None = None  # the optimizer's learning rate in this step, where it is known
    squares: Tensor | None = field(default=None, repr=False, compare=False)  # where the reducer wants them
    sizes: tuple[int, ...] = field(init=False, repr=False)
    offsets: tuple[int, ...] = field(init=False, repr=False)  # len(names) + 1 of them
    id: int = field(init=False, repr=False)  # the same on every worker: a hash of names and shapes

    def __post_init__(self) -> None:
        self.sizes = tuple(math.prod(shape) for shape in self.shapes)
        offsets = [0]
        for size in self.sizes:
            offsets.append(offsets[-1] + size)
        self.offsets = tuple(offsets)
        text = repr((self.names, self.shapes)).encode()
        self.id = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.offsets[-1]

    def subset(self, members: list[int]) -> "Bucket":
        """The bucket of only these tensors (by position), packed without gaps."""
        return Bucket(
            tuple(self.names[i] for i in members),
            tuple(self.shapes[i] for i in members),
            self.step,
            self.seed,
        )

    @staticmethod
    def flat(numel: int, name: str = "x", seed: int = 0) -> "Bucket":
        """A bucket with a single vector in it."""
        return Bucket((name,), ((numel,),), seed=seed)


def scratch(state: State, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer that lives in the state between steps, so that steady state allocates nothing; contents undefined."""
    buffer = state.get("_" + key)
    if buffer is None or buffer.numel() < numel:
        buffer = state["_" + key] = torch.empty(numel, dtype=dtype, device=device)
    return buffer[:numel]


def reserve(state: State, key: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``scratch``, for results of unknown length: all of the buffer that has grown so far, at least ``numel``."""
    scratch(state, key, numel, dtype, device)
    buffer: Tensor = state["_" + key]
    return buffer


def later(state: State, **changes: Any) -> None:
    """Notes what the state shall hold once the step is settled."""
    state.setdefault("_next", {}).update(changes)


def spare(state: State, key: str) -> Tensor:
    """A tensor like ``state[key]`` to write its next value into: two buffers that change places at each step."""
    buffer = state.get("_spare_" + key)
    return torch.empty_like(state[key]) if buffer is None else buffer


class Payload:
    """The bytes that stand for one float32 vector of ``numel`` elements.

    ``finite`` is False if the vector held a NaN or an infinity: such a payload has no body, and decodes to NaN.
    """

    __slots__ = ("_memory", "body", "finite", "numel")

    def __init__(self, body: Tensor, numel: int, finite: bool = True, memory: Tensor | None = None):
        self.body = body
        self.numel = numel
        self.finite = finite
        self._memory = memory  # the body with room for a header in front, if it was encoded here

    @staticmethod
    def empty(nbytes: int, numel: int, state: State, device: torch.device) -> "Payload":
        """A payload with an unwritten body of ``nbytes``, in the state's scratch."""
        memory = scratch(state, "payload", HEADER_NBYTES + nbytes, torch.uint8, device)
        return Payload(memory[HEADER_NBYTES:], numel, memory=memory)

    @staticmethod
    def nonfinite(numel: int, state: State, device: torch.device) -> "Payload":
        """The payload of a vector that holds a NaN or an infinity."""
        payload = Payload.empty(0, numel, state, device)
        payload.finite = False
        return payload

    def trim(self, nbytes: int) -> "Payload":
        """The same payload with only the first ``nbytes`` of its body."""
        return Payload(self.body[:nbytes], self.numel, self.finite, self.frame[: HEADER_NBYTES + nbytes])

    @property
    def frame(self) -> Tensor:
        """Header and body in one piece; ``wire.seal`` writes the header."""
        assert self._memory is not None, "only a payload that was encoded here has room for a header"
        return self._memory

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return HEADER_NBYTES + self.body.numel()


class Compressor(Spec, ABC):
    """A codec for one flat float32 vector; see the module's docstring for the contract."""

    summable: ClassVar[torch.dtype | None] = (
        None  # set if bodies are vectors of this dtype (see ``summed``) and adding them adds the vectors
    )
    conserves: bool = True  # False if a payload may stand for something that neither goes out nor stays behind
    unbiased: bool = False  # True if the mean over its draws is the vector itself
    contracts: bool = True  # |x - decoded| <= |x|, always: what error feedback needs; False if it may be longer

    def init(self, bucket: Bucket, seed: int) -> State:
        """A fresh state for this bucket."""
        return {}

    @abstractmethod
    def encode(self, x: Tensor, state: State) -> Payload:
        """The payload of ``x``. Does not change ``x``."""

    def encode_sum(self, a: Tensor, b: Tensor, total: Tensor, state: State) -> Payload:
        """``total = a + b``, and the payload of ``total``. If the sum is not finite, ``total`` is unspecified."""
        kernels.on(total).add_scaled(a, b, 1.0, total)
        return self.encode(total, state)

    @abstractmethod
    def add_decoded(self, payload: Payload, acc: Tensor, scale: float) -> bool | None:
        """``acc += scale * decoded(payload)`` for a finite payload of the right length (see ``accumulate``)."""

    def accumulate(self, payload: Payload, acc: Tensor, scale: float = 1.0) -> bool | None:
        """``acc += scale * decoded(payload)``; a non-finite payload makes ``acc`` NaN throughout.

        Returns whether all elements that it changed are finite now, None if it did not look.
        """
        self._check_length(payload, acc)
        if payload.finite:
            return self.add_decoded(payload, acc, scale)
        acc.fill_(math.nan)
        return False

    def _check_length(self, payload: Payload, acc: Tensor) -> None:
        if acc.numel() != self.accumulator_numel(payload.numel):
            raise ValueError(
                f"a payload of {payload.numel} elements needs an accumulator of "
                f"{self.accumulator_numel(payload.numel)}, and this one has {acc.numel()}."
            )

    def accumulator_numel(self, numel: int) -> int:
        """How long an accumulator for vectors of ``numel`` elements is."""
        return numel

    def accumulator(self, out: Tensor, state: State) -> Tensor:
        """Zeros to sum payloads in."""
        return out.zero_()

    def finish(self, acc: Tensor, out: Tensor, state: State) -> None:
        """Bring the sum in ``acc`` home to ``out``."""

    def sum_decoded(self, payloads: list[Payload], scale: float, out: Tensor, state: State) -> bool | None:
        """``out = scale * (sum of decoded payloads)``, in their order; says whether it is finite, as ``accumulate``."""
        acc = self.accumulator(out, state)
        finite = [self.accumulate(payload, acc, scale) for payload in payloads]
        self.finish(acc, out, state)
        return None if acc is not out or None in finite else all(finite)

    def remove(self, payload: Payload, x: Tensor, state: State) -> None:
        """``x -= decoded(payload)``: leaves in ``x`` what the payload does not carry."""
        self.accumulate(payload, x, -1.0)

    def summed(self, payload: Payload) -> Tensor:
        """The end of a summable body that is added when payloads are, as a view; by default all of it.

        What stands before it must be the same on all workers that were given the same seed.
        """
        assert self.summable is not None
        return payload.body.view(self.summable)

    def sections(self, payload: Payload) -> dict[str, int]:
        """Where the body's bytes go, for people: section -> bytes."""
        return {"values": payload.body.numel()}


class Pending(ABC):
    """A message on its way: what it sends must stay as it is, and where it arrives must not be read, until ``wait``."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Returns where the message arrived, once it is there and the one that went out has left. To be called once."""


class Comm(ABC):
    """The only way out of the process. Every call is collective: all workers make the same calls in the same order.

    Tensors that a call returns live in the Comm's own buffers and are valid until its next call.
    """

    rank: int
    size: int
    _room: Tensor | None = None

    @abstractmethod
    def all_reduce(self, x: Tensor) -> None:
        """``x`` becomes the sum over workers, the same bits everywhere."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every worker's bytes in rank order; lengths may differ."""

    @abstractmethod
    def start_shift(self, x: Tensor, into: Tensor, by: int = 1) -> Pending:
        """Begins to send bytes to rank + ``by`` of the ring, and to receive those of rank - ``by`` in ``into``.

        ``into`` is room: what arrives may be shorter, never longer. An empty ``x`` is no message, and none arrives in
        an empty ``into``. Messages between two workers arrive in the order in which they were started.
        """

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """``x`` becomes the root's ``x``."""

    def room(self, numel: int) -> Tensor:
        """Float32 working room that all who reduce over this Comm share, one after another; contents undefined."""
        if self._room is None or self._room.numel() < numel:
            self._room = torch.empty(numel)
        return self._room[:numel]


class Reducer(Spec, ABC):
    """How N workers turn N buckets into one mean; see the module's docstring for the law."""

    remembers: ClassVar[bool] = False  # has a memory of past gradients of its own
    squares: str | None = None  # set if ``bucket.squares`` must be there: over "samples" or "microbatch"es
    follows_lr: bool = False  # True if ``bucket.lr`` must be there
    brings_momentum: bool = False  # True if the optimizer must have none of its own
    ahead: float = 0.0  # learning rates of what waits by which parameters are moved while gradients are taken
    any_dtype: ClassVar[bool] = False  # takes buckets of every float dtype as they are, not only float32

    @property
    def conserves(self) -> bool:
        """Whether the law holds to the last bit of rounding; False if something is thrown away on purpose."""
        return True

    def settled(self) -> "Reducer":
        """This reducer as it runs once its beginning is over: what a warm-up or a schedule by steps ends with.

        >>> from tersegrad import parse
        >>> parse("Warmup(ErrorFeedback(Schedule(AllGather(TopK(0.1)), 'ratio', steps={0: 0.5, 9: 0.01})))").settled()
        ErrorFeedback(AllGather(TopK(ratio=0.01)))
        """
        children = {f.name: _settled(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]
        return replace(self, **children)  # type: ignore[type-var]

    @abstractmethod
    def init(self, bucket: Bucket, comm: Comm) -> State:
        """A fresh state for this bucket."""

    def plain(self, state: State, step: int) -> bool:
        """Whether in that step ``reduce`` would take the mean of the bucket as it is, and nothing else.

        Where all buckets say so, ``attach`` may let the process group do it, and ``reduce`` is not called.
        """
        return False

    @abstractmethod
    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """Writes the mean into ``out`` and leaves in ``x`` what was not sent."""

    def start(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> Finish:
        """``reduce`` in two parts: this one sends all there is to send, the one it returns waits for the others' bytes.

        Between the two, other buckets may be started, so that they are coded while these bytes travel. By default
        all is done here.
        """
        self.reduce(bucket, x, out, state, comm)
        return _nothing_left

    def start_sum(
        self, bucket: Bucket, a: Tensor, b: Tensor, total: Tensor, out: Tensor, state: State, comm: Comm
    ) -> Finish:
        """``start`` of ``total = a + b``, which is made here; ``out`` may be ``b``, and is not ``total``."""
        kernels.on(total).add_scaled(a, b, 1.0, total)
        return self.start(bucket, total, out, state, comm)

    def waiting(self, bucket: Bucket, state: State) -> Tensor | None:
        """What this worker remembers and has not sent, to be looked at until the next step; None if that is nothing.

        Reducers made of reducers pass it on. It is what ``flush`` adds.
        """
        return None

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """Adds to ``out`` what this worker remembers and has not sent, and notes (``later``) that it is gone.

        Reducers made of reducers pass it on.
        """


def _nothing_left() -> None:
    """The second part of a ``reduce`` that was done in one."""


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _settled(child) for key, child in value.items()}
    return value.settled() if isinstance(value, Reducer) else value


def mix_seed(*parts: int) -> int:
    """One 63-bit seed out of several numbers.

    >>> mix_seed(1, 2) == mix_seed(2, 1)
    False
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def require(spec: Spec, field_name: str, kind: type, advice: str) -> None:
    """Refuses a field of the wrong kind at construction, with what to write instead."""
    value = getattr(spec, field_name)
    if not isinstance(value, kind):
        raise TypeError(
            f"{type(spec).__name__}: {field_name} must be a {kind.__name__.lower()}, and {value!r} is not one. {advice}"
        )


def require_fraction(spec: Spec, field_name: str, advice: str) -> None:
    """Refuses a field that is not a number above 0 and at most 1."""
    value = getattr(spec, field_name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(
            f"{type(spec).__name__}({field_name}={value!r}): a fraction is above 0 and at most 1. {advice}"
        )
