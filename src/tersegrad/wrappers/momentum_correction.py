"""MomentumCorrection: apply momentum before sending, so that delayed gradients have the right momentum.

Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training", ICLR 2018.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import (
    Comm,
    Finish,
    Layout,
    Memory,
    Needs,
    Reducer,
    State,
    Step,
    Vector,
    added,
    back_buffer,
    contribution,
    param,
    stage,
)
from tersegrad.wrappers import _clip


@dataclass(frozen=True, repr=False)
class MomentumCorrection(Memory):
    """Error feedback on velocities instead of gradients: momentum is applied on each worker, before sending.

    u = momentum * u + gradient;  v = v + u;  out, v = inner(v);  u = 0 wherever something of v was sent (masking)

    ``out`` is the whole step: the optimizer is SGD with no momentum of its own, and its weight decay, which momentum no
    longer amplifies, is the usual one / (1 - momentum). With momentum=0 this is ErrorFeedback.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "MomentumCorrection(AllGather(TopK(0.1)), momentum=0.5)",
        "MomentumCorrection(Ring(BF16()), momentum=0.3, nesterov=True, clip=1000000.0)",
    )

    inner: Reducer = param(doc="the reducer that sends")
    momentum: float = param(
        0.9, "higher => a longer memory; every gradient is applied 1 / (1 - momentum) times in the end"
    )
    nesterov: bool = param(False, "True: v = v + gradient + momentum * u")
    masking: bool = param(True, "False: keep the velocity, and with it stale momentum, of elements that were sent")
    clip: float | None = param(None, _clip.DOC)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _clip.is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"MomentumCorrection(momentum={self.momentum!r}): a number from 0 to below 1, e.g. 0.9.")
        for name in ("nesterov", "masking"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"MomentumCorrection({name}={getattr(self, name)!r}): write True or False.")
        _clip.require_clip(self, self.clip)

    def needs(self) -> Needs:
        """The optimizer must have no momentum: it is applied here."""
        return Needs(no_momentum=self.momentum > 0)

    def init(self, layout: Layout, comm: Comm) -> State:
        return {"velocity": layout.zeros(), **super().init(layout, comm)}

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """The unsent part of the total becomes the residual; with masking, the velocity of the sent part is reset."""
        x = added(x)
        if self.clip is not None:
            _clip.clip_tensors(x, step.layout, self.clip, comm.size)
        kernel, how = kernels.on(x), (self.momentum, self.nesterov)
        velocity, residual = state["velocity"], state["residual"]
        next_velocity, total = back_buffer(state, "velocity"), back_buffer(state, "residual")
        kernel.add_momentum(x, velocity, residual, *how, next_velocity, total)
        for idle in step.idle_slices():
            total[idle] = 0.0
        finish_inner = self.inner.start(step, total, out, state["inner"], comm)

        def finish() -> bool | None:
            finite = finish_inner()
            if self.masking and self.momentum:
                kernel.mask_sent(velocity, residual, total, *how, next_velocity)
            for idle in step.idle_slices():
                next_velocity[idle] = velocity[idle]
                total[idle] += residual[idle]
            stage(state, velocity=next_velocity, residual=total)
            if out is not x:
                x.zero_()  # all of it was sent or is in the residual
            return finite

        return finish

    def clear(self, layout: Layout, state: State) -> None:
        """Stage a zero residual; with masking also a zero velocity, as if everything had been sent."""
        super().clear(layout, state)
        if self.masking:
            stage(state, velocity=back_buffer(state, "velocity").zero_())


@contribution.register
def _contribution(reducer: MomentumCorrection, layout: Layout, state: State, x: Tensor, workers: int) -> Tensor:
    """What this step adds to v: the velocity, or Nesterov's variant of it."""
    x = x.clone()
    if reducer.clip is not None:
        _clip.clip_tensors(x, layout, reducer.clip, workers)
    velocity, total = torch.empty_like(x), torch.empty_like(x)
    how = reducer.momentum, reducer.nesterov
    kernels.on(x).add_momentum(x, state["velocity"], torch.zeros_like(x), *how, velocity, total)
    return total
