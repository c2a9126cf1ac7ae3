"""Roll call: every so often all workers say where they are, where nothing else that they send would tell.

A frame names its step, bucket and spec; a sum does not. If a worker goes on from a state of another step than the
others, or its buckets are others, the sums are of gradients that do not belong together, and nobody would know. So the
workers exchange a few bytes while the last bucket travels: the step, all buckets since the last roll call, and the
tensors that they had no gradient of; and before the first one the learning rate, where a schedule follows it.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tersegrad.core import Comm, Pending, Reducer
from tersegrad.reducers import VGC, AllGather, Ring, SignSGD, TwoShot
from tersegrad.wrappers import ErrorFeedback, LowMemory, MomentumCorrection, Schedule, StepAhead

_FIELDS = struct.Struct("<qQd")  # step, hash of its buckets, learning rate
_FRAMED = (AllGather, Ring, TwoShot, SignSGD, VGC)
_SEND_NOTHING = (ErrorFeedback, LowMemory, MomentumCorrection, Schedule, StepAhead)  # but what is inside them

FIRST = 3  # steps in which the roll is called each time
EVERY = 16  # steps between two roll calls later: one costs as much as a small all-reduce

Names = tuple[str, ...]


class StepsDifferError(ValueError):
    """The ranks are not in the same step, or do not do the same in it."""


def has_frames(spec: Reducer) -> bool:
    """Whether all that a spec sends has a header that names its step, bucket and spec.

    >>> from tersegrad import parse
    >>> has_frames(parse("topk")), has_frames(parse("powersgd"))
    (True, False)
    """
    return all(isinstance(part, _FRAMED + _SEND_NOTHING) for part in spec.walk() if isinstance(part, Reducer))


def follows_lr(spec: Reducer) -> bool:
    """Whether the lengths of messages may depend on the learning rate."""
    return any(isinstance(part, Schedule) and part.needs().lr for part in spec.walk())


class RollCall:
    """One for an engine. ``see`` its buckets, ``start`` and ``finish``; used by one thread at a time.

    Args:
        comm: The way to the others.
        tensors: All names, if it is to be told which of them had no gradient; empty if not.
        with_lr: Whether the learning rate must be the same.
    """

    def __init__(self, comm: Comm, tensors: Sequence[str] = (), with_lr: bool = False):
        self._comm = comm
        self._place = {name: i for i, name in enumerate(tensors)}
        self._with_lr = with_lr
        self._steps = 0  # that this worker has taken part in; all workers have in as many
        self._ids: dict[Names, int] = {}
        self._buckets = 0
        self._idle = np.zeros(len(tensors), dtype=bool)
        self._pending: Pending | None = None

    def see(self, names: Names) -> None:
        """One more bucket of this step."""
        if names not in self._ids:
            self._ids[names] = int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "little")
        self._buckets = (self._buckets * 0x9E3779B97F4A7C15 + self._ids[names]) % (1 << 64)

    def ends_step(self) -> bool:
        """Called once a step: whether the roll is to be called in it. In every step, if tensors may be idle."""
        self._steps += 1
        return bool(self._place) or self._steps <= FIRST or self._steps % EVERY == 0

    def see_idle(self, names: frozenset[str]) -> None:
        """This worker has no gradient of these tensors."""
        for name in names:
            self._idle[self._place[name]] = True

    def start(self, step: int, lr: float | None = None) -> Pending:
        """Says where this worker is; what is seen from now on belongs to the next roll call."""
        head = _FIELDS.pack(step, self._buckets, lr if self._with_lr and lr is not None else 0.0)
        message = torch.frombuffer(bytearray(head + np.packbits(self._idle).tobytes()), dtype=torch.uint8)
        self._buckets = 0
        self._idle[:] = False
        self._pending = self._comm.start_all_gather(message)
        return self._pending

    def finish(self, wait: bool = True) -> frozenset[str]:
        """The tensors that no worker had a gradient of.

        Args:
            wait: False if the future of what ``start`` returned has completed.

        Raises:
            StepsDifferError: A worker is elsewhere; on every worker, with what all of them said.
        """
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return self._compare(pending.wait() if wait else pending.result())

    def _compare(self, said: Tensor) -> frozenset[str]:
        rows = said.numpy().reshape(self._comm.size, -1)
        if (rows[:, : _FIELDS.size] != rows[0, : _FIELDS.size]).any():
            raise StepsDifferError(_told([_FIELDS.unpack(row[: _FIELDS.size].tobytes()) for row in rows], self._comm))
        if not self._place:
            return frozenset()
        idle = np.unpackbits(np.bitwise_and.reduce(rows[:, _FIELDS.size :]), count=len(self._place)).astype(bool)
        return frozenset(name for name, i in self._place.items() if idle[i]) if idle.any() else frozenset()


def _told(said: list[tuple[int, int, float]], comm: Comm) -> str:
    """Which ranks said what, of the first thing that differs."""
    steps, buckets, rates = zip(*said, strict=True)
    if len(set(steps)) > 1:
        what = _by_rank([f"step {step}" for step in steps], comm)
        return (
            f"the ranks are not in the same step: {what}. Some have taken part in fewer steps than others, or go on "
            "from a state of another step. Nothing of this step is remembered."
        )
    if len(set(rates)) > 1:
        what = _by_rank([f"{rate:g}" for rate in rates], comm)
        return f"step {steps[0]}: the learning rate, which a schedule follows, differs: {what}."
    what = _by_rank([f"{number:#x}" for number in buckets], comm)
    return f"step {steps[0]}: the ranks do not reduce the same buckets ({what}): the model differs between them."


def _by_rank(words: list[str], comm: Comm) -> str:
    groups = {word: [str(comm.name(rank)) for rank, other in enumerate(words) if other == word] for word in words}
    return ", ".join(f"{word} on rank {' and '.join(ranks)}" for word, ranks in groups.items())
