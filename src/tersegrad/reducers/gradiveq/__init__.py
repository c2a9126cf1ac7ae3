"""GradiVeQ: convolutions are sent as coefficients in a learned basis, and the coefficients are summed.

Yu et al., "GradiVeQ: vector quantization for bandwidth-efficient gradient aggregation in distributed CNN training",
NeurIPS 2018.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from tersegrad.compressors.cast import Cast
from tersegrad.compressors.identity import Identity
from tersegrad.core import (
    Comm,
    Finish,
    Layout,
    Memory,
    Reducer,
    State,
    Step,
    Vector,
    added,
    nothing_left,
    param,
    phases,
    reduce,
    report,
    require,
    stage,
    staged,
    why_uncompressed,
)
from tersegrad.reducers.dense import Dense
from tersegrad.reducers.gradiveq import fitting, published
from tersegrad.reducers.gradiveq.layer import COMPRESS, LEARN, REFUSED, WARM_UP, Layer, drifted
from tersegrad.reducers.gradiveq.message import reduce_learners, reduce_packed
from tersegrad.reducers.gradiveq.slices import Slicing, published_slicing, slicing
from tersegrad.reducers.ring import Ring

HELD_OUT = 0.2  # share of the samples that validate the basis
LOOKS = 40  # measurements of the loss in one compressed phase
LONGEST_REFUSAL = 8  # compressed phases, at most, before a layer whose basis was rejected learns again


@dataclass(frozen=True, repr=False)
class GradiVeQ(Reducer):
    """Sends slices of convolutions as d coefficients each in a basis learned from past means, by one all-reduce.

    A layer is split into slices of K elements (``slices.py``). For worker n, slice m, basis U and mean mu_m:

        c = U^T (g - mu_m)       the mean over workers of c is c of the mean gradient
        mean gradient = U c + mu_m

    A layer warms up, learns U and mu from ``learn`` means, is compressed for ``compress`` steps, and learns again. All
    workers are in the same phase, as it depends on the means that all received. Other tensors are not compressed.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "GradiVeQ(warmup=0, learn=2, compress=2, worst=None, tiny=0)",
        "GradiVeQ(slice_size=20, loss=0.3, warmup=1, learn=3, compress=3, worst=9.0, order='channel', tiny=0)",
        "GradiVeQ(warmup=0, learn=2, compress=9, learning=TwoShot(QSGD(bits=4)), coefficients=TwoShot(QSGD(bits=8)), "
        "basis='slice', worst=None, linear=True)",
        "ErrorFeedback(GradiVeQ(warmup=0, learn=2, compress=9, worst=None, drift=None, samples=200000, linear=True))",
        "GradiVeQ(warmup=0, learn=3, compress=9, coefficients=Ring(Identity()), order='filter', worst=None, "
        "linear=True, tiny=0)",
        "GradiVeQ(warmup=0, learn=2, compress=9, learning=Ring(QSGD(bits=4)), basis=2, vote=0.9, rule='paper')",
    )

    slice_size: int = param(1024, "largest K: longer slices => fewer bytes, more work and memory (K d)")
    loss: float = param(0.1, "lambda, share of the samples' energy outside the basis: more => fewer coefficients")
    learn: int = param(100, "L_t, steps whose means are samples: more => a better basis, more uncompressed steps")
    compress: int = param(400, "L_c, steps between two learning phases: more => fewer bytes, a staler basis")
    warmup: int = param(2500, "uncompressed steps before the first learning phase")
    basis: str | int = param(
        "layer", 'one per "layer" or "slice" (more memory, fewer samples); a number: of slices, with rule="paper"'
    )
    order: str = param("channel", 'a slice is a "filter", whole input "channel"s, or whole "position"s as in the paper')
    learning: Reducer = param(doc="reducer of layers while they learn; quantised => fewer bytes", factory=Dense)
    coefficients: Reducer = param(doc="reducer of the coefficients", factory=Dense)
    worst: float | None = param(
        0.5, "reject a basis that misses more than this share of held-out energy; None: accept any"
    )
    drift: float | None = param(3.0, "learn early when the odds of the loss have grown by this factor; None: never")
    samples: int = param(1 << 22, "floats kept per layer while it learns: fewer => less memory, fewer slices sampled")
    linear: bool = param(False, "True: matrices too (beyond the paper)")
    tiny: int = param(1024, "layers of fewer elements are not compressed")
    vote: float | None = param(
        None, "learn early when most workers lose more than this share of their gradient's energy, instead of drift"
    )
    rule: str = param(
        "ours", '"paper": as published: first slice, no judge, every worker fits, pipelined ring; ignores six others'
    )

    def __post_init__(self) -> None:
        for name in ("learning", "coefficients"):
            require(self, name, Reducer, f"Write e.g. {name}=TwoShot(QSGD(bits=8)).")
            self._refuse_memory(name)
        least = 3 if self.judges else 2
        bounds = {"slice_size": 1, "learn": least, "compress": 1, "warmup": 0, "samples": 1, "tiny": 0}
        for name, smallest in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise ValueError(f"GradiVeQ({name}={value!r}): give a whole number from {smallest} on.")
        if not 0 <= self.loss < 1:
            raise ValueError(f"GradiVeQ(loss={self.loss!r}): a share of the energy, at least 0 and below 1, e.g. 0.01.")
        self._check_basis()
        for name, choices in (("order", ("filter", "channel", "position")), ("rule", ("ours", "paper"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"GradiVeQ({name}={getattr(self, name)!r}): write {' or '.join(map(repr, choices))}.")
        for name, bound in (("worst", 0.0), ("drift", 1.0), ("vote", 0.0)):
            value = getattr(self, name)
            if value is not None and not value > bound:
                raise ValueError(f"GradiVeQ({name}={value!r}): give a number above {bound}, or None to switch it off.")

    def _check_basis(self) -> None:
        number = type(self.basis) is int and self.basis > 0
        if number and self.rule != "paper":
            raise ValueError(
                f"GradiVeQ(basis={self.basis}): a basis for so many slices is the paper's reuse factor. Write "
                "rule='paper' too, or basis='layer'."
            )
        if not number and self.basis not in ("layer", "slice"):
            raise ValueError(
                f"GradiVeQ(basis={self.basis!r}): write 'layer' or 'slice', or with rule='paper' a number of slices."
            )

    def _refuse_memory(self, name: str) -> None:
        inner = getattr(self, name)
        for spec in inner.walk():
            if isinstance(spec, GradiVeQ | Memory):
                raise ValueError(
                    f"GradiVeQ({name}={inner!r}): {type(spec).__name__} has a memory that would belong to another "
                    f"phase or basis. Write ErrorFeedback(GradiVeQ(...)) to keep the residual."
                )

    def loses(self, workers: int) -> float:
        """The larger loss of the two reducers that it sends with."""
        return max(self.learning.loses(workers), self.coefficients.loses(workers))

    @property
    def learns_apart(self) -> bool:
        """Whether learning layers are sent separately: not if they and the other tensors are all dense."""
        return not isinstance(self.learning, Dense)

    @property
    def codes_apart(self) -> bool:
        """Whether coefficients are sent separately: not if they and the other tensors are all dense."""
        return not isinstance(self.coefficients, Dense)

    @property
    def ring(self) -> Ring | None:
        """The ring in which coefficients are made while others travel; None if they are all made before."""
        if isinstance(self.coefficients, Ring) and isinstance(self.coefficients.compressor, Identity | Cast):
            return self.coefficients
        return Ring(Identity(), pieces=1) if self.rule == "paper" and not self.codes_apart else None

    @property
    def judges(self) -> bool:
        """Whether some samples are held out to judge a basis."""
        return self.worst is not None and self.rule != "paper"

    @property
    def fitted(self) -> int:
        """How many of the samples the basis is fitted to; the others validate it."""
        return self.learn - max(1, round(HELD_OUT * self.learn)) if self.judges else self.learn

    def slicing(self, shape: tuple[int, ...]) -> Slicing | None:
        """How a tensor of this shape is split; None if it is never compressed."""
        if self.rule == "paper":
            return published_slicing(shape, self.slice_size)
        return None if math.prod(shape) < self.tiny else slicing(shape, self.slice_size, self.order, self.linear)

    def init(self, layout: Layout, comm: Comm) -> State:
        """Every layer at the start of its warm-up."""
        members = [i for i, shape in enumerate(layout.shapes) if self.slicing(shape) is not None]
        part = layout.subset(members)
        first = WARM_UP if self.warmup else LEARN
        layers = {
            f"layer {name}": {
                "names": [name],
                "phase": first,
                "count": 0,  # steps of this phase
                "samples": {},  # while learning
                "fit": {},  # while compressed
                "local_loss": {},  # while compressed: the first measurement, and an average of recent ones
                "report": {"fits": 0, "refusals": 0, "drifts": 0},
            }
            for name in part.names
        }
        state: State = {"layers": layers}
        if self.learns_apart:
            state["learning"] = {"names": list(part.names), "inner": self.learning.init(part, comm)}
        if self.codes_apart and self.ring is None:
            state["coefficients"] = self.coefficients.init(layout, comm)
            _refuse_tensors(state["coefficients"], self.coefficients)
        return state

    def _layers(self, layout: Layout, x: Tensor, out: Tensor, state: State) -> list[Layer]:
        found = []
        for i, name in enumerate(layout.names):
            slicing = self.slicing(layout.shapes[i])
            if slicing is not None:
                start, end = layout.offsets[i : i + 2]
                memory = state["layers"][f"layer {name}"]
                looks = memory["phase"] == COMPRESS and self._looks(memory["count"])
                found.append(Layer(i, slicing, memory, memory["phase"], x[start:end], out[start:end], looks))
        return found

    def start(self, step: Step, x: Vector, out: Tensor, state: State, comm: Comm) -> Finish:
        """Send each layer according to its phase: one all-reduce for all summable parts; then update the bases."""
        x = added(x)
        layers = self._layers(step.layout, x, out, state)
        learners = [layer for layer in layers if layer.phase == LEARN]
        coded = [layer for layer in layers if layer.phase == COMPRESS]
        apart = learners if self.learns_apart else []
        if not coded and not apart:
            reduce(Dense(), step, x, out, {}, comm)  # in place, without packing
        else:
            if apart:
                reduce_learners(self, step, apart, x, out, state, comm)
            seen = reduce_packed(self, step, coded, apart, x, out, state, comm)
            self._note(coded, seen, comm.size)
        for layer in layers:
            if layer.phase == LEARN:
                fitting.sample(self, layer, state)
            else:
                self._advance(layer)
        due = fitting.due(self, learners)
        if due and bool(out.isfinite().all()):  # else the step is rolled back
            (published if self.rule == "paper" else fitting).fit(self, due, comm)
        for layer in layers:
            name = step.layout.names[layer.place]
            report(layer.memory, layer={name: staged(layer.memory)["report"]})
        return nothing_left

    # ---- phases ------------------------------------------------------------------------------------

    def _looks(self, count: int) -> bool:
        """Whether the loss of a compressed layer is measured in this step of its phase."""
        if self.vote is not None:
            return True
        return self.drift is not None and self.rule != "paper" and count % max(1, self.compress // LOOKS) == 0

    def opinions(self, coded: list[Layer]) -> list[float]:
        """What this worker says of each layer whose loss is measured: the loss, or whether it is too large."""
        seen = [layer.local_loss for layer in coded if layer.looks]
        return seen if self.vote is None else [float(not loss <= self.vote) for loss in seen]

    def _note(self, coded: list[Layer], seen: list[float], workers: int) -> None:
        """Decide by the mean over workers of their opinions, which is the same on all, which layers learn again."""
        looking = [layer for layer in coded if layer.looks]
        for layer, opinion in zip(looking, seen, strict=True):
            if not math.isfinite(opinion):
                continue  # gradients so large that their squares overflow
            if self.vote is not None:
                layer.ends = 2 * round(opinion * workers) > workers
                continue
            known = layer.memory["local_loss"]
            recent = (known["recent"] + opinion) / 2 if known else opinion
            loss = {"first": known.get("first", opinion), "recent": recent}
            stage(layer.memory, local_loss=loss)
            assert self.drift is not None
            layer.ends = drifted(loss, self.drift, self.loss)

    def _advance(self, layer: Layer) -> None:
        """Count a step of a phase other than learning; at its end the layer learns."""
        memory, count = layer.memory, layer.memory["count"] + 1
        refusals = memory["report"]["refusals"]
        pause = self.compress * min(2 ** max(0, refusals - 1), LONGEST_REFUSAL)
        lasts = {WARM_UP: self.warmup, COMPRESS: self.compress, REFUSED: pause}[layer.phase]
        if count >= lasts or layer.ends:
            figures = {**memory["report"], "drifts": memory["report"]["drifts"] + layer.ends}
            stage(memory, phase=LEARN, count=0, fit={}, local_loss={}, report=figures)
        else:
            stage(memory, count=count)


def _refuse_tensors(state: State, spec: Reducer) -> None:
    """Raise ValueError if the reducer of coefficients keeps per-element state: their number changes with the basis."""
    for value in state.values():
        if isinstance(value, dict):
            _refuse_tensors(value, spec)
        elif isinstance(value, Tensor):
            raise ValueError(
                f"GradiVeQ(coefficients={spec!r}) keeps state for each element, and the number of coefficients "
                "changes. Use a stateless method, e.g. AllReduce(BF16())."
            )


@phases.register
def _phases(reducer: GradiVeQ) -> list[Reducer]:
    """A variant that learns within a few steps and then compresses with any basis."""
    return [reducer, replace(reducer, warmup=0, learn=3, compress=2, worst=None, samples=1 << 16)]


@why_uncompressed.register
def _why_uncompressed(reducer: GradiVeQ, shapes: list[tuple[int, ...]]) -> str | None:
    """If the model has no layer that it splits."""
    if any(reducer.slicing(shape) is not None for shape in shapes):
        return None
    if reducer.rule == "paper":
        return (
            "no tensor is a convolution with at most slice_size filters times channels. Write rule='ours', linear=True"
        )
    if not reducer.linear and any(replace(reducer, linear=True).slicing(shape) is not None for shape in shapes):
        return "there are no convolutions. Write linear=True to compress matrices too"
    return f"every layer is too small (tiny={reducer.tiny}) or has more rows than slice_size={reducer.slice_size}"
