"""MomentumCorrection: momentum before sending, so that what is late has the momentum it would have had.

Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training", ICLR 2018.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Bucket, Comm, Reducer, State, later, require, spare
from tersegrad.wrappers.memory import refuse_memory


@dataclass(frozen=True, repr=False)
class MomentumCorrection(Reducer):
    """Accumulates velocities instead of gradients, sends of the sum what ``inner`` sends, and remembers the rest.

    u = momentum * u + gradient;  v = v + u;  out, v = inner(v);  u = 0 wherever something of v was sent (masking)

    ``out`` is the whole step: the optimizer is SGD with no momentum of its own. With momentum=0 this is ErrorFeedback.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "MomentumCorrection(AllGather(TopK(0.1)), momentum=0.5)",
        "MomentumCorrection(Ring(BF16()), momentum=0.3, nesterov=True, clip=1000000.0)",
    )
    remembers: ClassVar[bool] = True

    inner: Reducer  # what sends
    momentum: float = 0.9  # higher => a longer memory; every gradient is applied 1 / (1 - momentum) times in the end
    nesterov: bool = False  # True: v = v + gradient + momentum * u
    masking: bool = True  # False: velocity lives on where something was sent, and stale momentum with it
    clip: float | None = (
        None  # each tensor's local gradient is scaled down to norm clip / sqrt(workers); lower => calmer
    )

    def __post_init__(self) -> None:
        require(self, "inner", Reducer, f"Write MomentumCorrection(AllGather({self.inner!r})).")
        refuse_memory(self, self.inner)
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"MomentumCorrection(momentum={self.momentum!r}): a number from 0 to below 1, e.g. 0.9.")
        for name in ("nesterov", "masking"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"MomentumCorrection({name}={getattr(self, name)!r}): write True or False.")
        if self.clip is not None and not (_is_number(self.clip) and 0 < self.clip < math.inf):
            raise ValueError(f"MomentumCorrection(clip={self.clip!r}): a norm above 0, or None to clip nothing.")

    @property
    def conserves(self) -> bool:
        """Not with momentum, which makes 1 / (1 - momentum) gradients of one; nor if gradients are clipped."""
        return self.momentum == 0 and self.clip is None and self.inner.conserves

    @property
    def brings_momentum(self) -> bool:  # type: ignore[override]
        """That is what it is for."""
        return self.momentum > 0

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """At rest, and nothing is late yet."""
        zeros = torch.zeros(bucket.numel)
        return {"velocity": zeros, "residual": zeros.clone(), "inner": self.inner.init(bucket, comm)}

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """What ``inner`` leaves of the total is the next residual, and says where the velocity ends."""
        if self.clip is not None:
            _clip(x, bucket, self.clip / math.sqrt(comm.size))
        kernel, how = kernels.on(x), (self.momentum, self.nesterov)
        velocity, residual = state["velocity"], state["residual"]
        next_velocity, total = spare(state, "velocity"), spare(state, "residual")
        kernel.add_momentum(x, velocity, residual, *how, next_velocity, total)
        self.inner.reduce(bucket, total, out, state["inner"], comm)
        if self.masking and self.momentum:
            kernel.mask_sent(velocity, residual, total, *how, next_velocity)
        later(state, velocity=next_velocity, residual=total)
        if out is not x:
            x.zero_()  # all of it is sent or remembered

    def waiting(self, bucket: Bucket, state: State) -> Tensor | None:
        """The residual."""
        residual: Tensor = state["residual"]
        return residual

    def flush(self, bucket: Bucket, out: Tensor, state: State) -> None:
        """The residual goes out; as it is sent everywhere, masking ends the velocity everywhere."""
        out.add_(state["residual"])
        later(state, residual=spare(state, "residual").zero_())
        if self.masking:
            later(state, velocity=spare(state, "velocity").zero_())
        self.inner.flush(bucket, out, state["inner"])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _clip(x: Tensor, bucket: Bucket, limit: float) -> None:
    """Scales every tensor down to a norm of at most ``limit``, in place; what is not finite stays so."""
    for tensor in x.split(bucket.sizes):
        norm = math.sqrt(kernels.on(x).moments(tensor).squares)
        if not norm <= limit:
            tensor.mul_(limit / norm)  # NaN stays NaN, and an infinity times 0 becomes one
