"""GradiVeQ: convolutions travel as coefficients of a learned basis, and are summed as such.

Yu et al., "GradiVeQ: vector quantization for bandwidth-efficient gradient aggregation in distributed CNN training",
NeurIPS 2018.
"""

import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import state as states
from tersegrad.codecs import pca
from tersegrad.codecs.slices import Slicing, slicing
from tersegrad.codecs.subspace import Subspace
from tersegrad.core import Bucket, Comm, Reducer, State, later, require, scratch, spare
from tersegrad.reducers.dense import Dense

WARM_UP, LEARN, COMPRESS, REFUSED = "warm-up", "learn", "compress", "refused"

HELD_OUT = 0.2  # of the samples do not shape the basis, but judge it
PAYS = 0.5  # d / K above which a layer is better sent as it is
LOOKS = 40  # at the loss, in one compressed phase
LARGEST_PROBLEM = 1024  # rows or columns of an eigenvalue problem: more take seconds
LONGEST_REFUSAL = 8  # compressed phases that a refused layer waits before it learns again, at most


@dataclass(frozen=True, repr=False)
class GradiVeQ(Reducer):
    """Sends slices of convolutions as d coefficients each in a basis learned from past means, by one all-reduce.

    A layer is cut into slices of K elements (``codecs/slices.py``). For worker n, slice m, basis U and mean mu_m:

        c = U^T (g - mu_m)       the mean over workers of c is c of the mean gradient
        mean gradient = U c + mu_m

    A layer warms up, learns U and mu from ``learn`` means, goes compressed for ``compress`` steps, and learns again.
    All workers are in the same phase: it depends on what all of them received. Everything else travels as it is.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "GradiVeQ(warmup=0, learn=2, compress=2, worst=None, tiny=0)",
        "GradiVeQ(slice_size=20, loss=0.3, warmup=1, learn=3, compress=3, worst=9.0, order='channel', tiny=0)",
        "GradiVeQ(warmup=0, learn=2, compress=9, learning=TwoShot(QSGD(bits=4)), coefficients=TwoShot(QSGD(bits=8)), "
        "basis='slice', worst=None, linear=True)",
        "ErrorFeedback(GradiVeQ(warmup=0, learn=2, compress=9, worst=None, drift=None, samples=200000, linear=True))",
    )

    slice_size: int = 1024  # K at most: longer slices => more in common, fewer bytes, more work and memory (K d)
    loss: float = 0.1  # lambda, of the samples' energy that the basis may miss: more => fewer coefficients
    learn: int = 100  # L_t, steps whose means are samples: more => a surer basis, more steps uncompressed
    compress: int = 400  # L_c, steps between two learnings: more => fewer bytes, a staler basis
    warmup: int = 2500  # plain steps before the first learning
    basis: str = "layer"  # one for each "layer", or for each "slice": d times the layer's memory, and few samples
    order: str = "channel"  # a slice is whole input "channel"s, or whole kernel "position"s, as in the paper
    learning: Reducer = field(default_factory=Dense)  # how layers travel while they learn; quantised => fewer bytes
    coefficients: Reducer = field(default_factory=Dense)  # how coefficients travel
    worst: float | None = 0.5  # of held-out gradients' energy: a basis that misses more is refused; None: not judged
    drift: float | None = 3.0  # learns early when the odds of the loss have grown so much; None: never
    samples: int = 1 << 22  # floats kept of a layer while it learns: fewer => less memory, fewer slices sampled
    linear: bool = False  # True: matrices too (beyond the paper)
    tiny: int = 1024  # layers of fewer elements travel as they are

    def __post_init__(self) -> None:
        for name in ("learning", "coefficients"):
            require(self, name, Reducer, f"Write e.g. {name}=TwoShot(QSGD(bits=8)).")
            self._refuse_memory(name)
        least = 2 if self.worst is None else 3
        bounds = {"slice_size": 1, "learn": least, "compress": 1, "warmup": 0, "samples": 1, "tiny": 0}
        for name, smallest in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise ValueError(f"GradiVeQ({name}={value!r}): give a whole number from {smallest} on.")
        if not 0 <= self.loss < 1:
            raise ValueError(f"GradiVeQ(loss={self.loss!r}): a share of the energy, at least 0 and below 1, e.g. 0.01.")
        for name, choices in (("basis", ("layer", "slice")), ("order", ("position", "channel"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"GradiVeQ({name}={getattr(self, name)!r}): write {choices[0]!r} or {choices[1]!r}.")
        for name, bound in (("worst", 0.0), ("drift", 1.0)):
            value = getattr(self, name)
            if value is not None and not value > bound:
                raise ValueError(f"GradiVeQ({name}={value!r}): give a number above {bound}, or None to switch it off.")

    def _refuse_memory(self, name: str) -> None:
        inner = getattr(self, name)
        for spec in inner.walk():
            if isinstance(spec, GradiVeQ) or (isinstance(spec, Reducer) and spec.remembers):
                raise ValueError(
                    f"GradiVeQ({name}={inner!r}): {type(spec).__name__} has a memory that would be of another phase "
                    f"or another basis. Write ErrorFeedback(GradiVeQ(...)) to keep what is not sent."
                )

    @property
    def conserves(self) -> bool:
        """If both ways of travelling do."""
        return self.learning.conserves and self.coefficients.conserves

    @property
    def fitted(self) -> int:
        """How many of the samples shape the basis; the others judge it."""
        return self.learn if self.worst is None else self.learn - max(1, round(HELD_OUT * self.learn))

    def slicing(self, shape: tuple[int, ...]) -> Slicing | None:
        """How a tensor of this shape is cut; None if it always travels as it is."""
        return None if math.prod(shape) < self.tiny else slicing(shape, self.slice_size, self.order, self.linear)

    # ---- state -------------------------------------------------------------------------------------

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Every layer before its first phase."""
        members = [i for i, shape in enumerate(bucket.shapes) if self.slicing(shape) is not None]
        part = bucket.subset(members)
        first = WARM_UP if self.warmup else LEARN
        layers = {
            f"layer {name}": {
                "names": [name],
                "phase": first,
                "count": 0,  # steps of this phase
                "samples": {},  # while learning
                "fit": {},  # while compressed
                "local_loss": {},  # while compressed: of the first look, and of the recent ones
                "report": {"fits": 0, "refusals": 0, "drifts": 0},
            }
            for name in part.names
        }
        state: State = {"layers": layers}
        if not isinstance(self.learning, Dense):
            state["learning"] = {"names": list(part.names), "inner": self.learning.init(part, comm)}
        if not isinstance(self.coefficients, Dense):
            state["coefficients"] = self.coefficients.init(bucket, comm)
            _refuse_tensors(state["coefficients"], self.coefficients)
        return state

    def _layers(self, bucket: Bucket, x: Tensor, out: Tensor, state: State) -> "list[_Layer]":
        found = []
        for i, name in enumerate(bucket.names):
            cut = self.slicing(bucket.shapes[i])
            if cut is not None:
                start, end = bucket.offsets[i : i + 2]
                memory = state["layers"][f"layer {name}"]
                found.append(_Layer(i, cut, memory, memory["phase"], x[start:end], out[start:end]))
        return found

    # ---- one step ----------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, x: Tensor, out: Tensor, state: State, comm: Comm) -> None:
        """Each layer by its phase: one all-reduce for all that may be added, then what was learned from it."""
        layers = self._layers(bucket, x, out, state)
        learners = [layer for layer in layers if layer.phase == LEARN]
        coded = [layer for layer in layers if layer.phase == COMPRESS]
        apart = [] if isinstance(self.learning, Dense) else learners
        if not coded and not apart:
            Dense().reduce(bucket, x, out, {}, comm)  # in place: nothing to pack
        else:
            if apart:
                self._reduce_apart(bucket, apart, x, out, state, comm)
            self._reduce_packed(bucket, coded, apart, x, out, state, comm)
        for layer in layers:
            if layer.phase == LEARN:
                self._sample(layer, state)
            else:
                self._advance(layer)
        due = self._due(learners)
        if due:
            self._fit(due, comm)

    def _reduce_apart(
        self, bucket: Bucket, learners: "list[_Layer]", x: Tensor, out: Tensor, state: State, comm: Comm
    ) -> None:
        """What is learned, by ``learning``."""
        part = bucket.subset([layer.place for layer in learners])
        part.lr = bucket.lr
        memory = self._learning_memory(bucket, part, state, comm)
        packed = scratch(state, "learning_x", part.numel, x.dtype, x.device)
        torch.cat([layer.x for layer in learners], out=packed)
        mean = packed if out is x else scratch(state, "learning_out", part.numel, x.dtype, x.device)
        self.learning.reduce(part, packed, mean, memory["inner"], comm)
        if out is not x:
            torch._foreach_copy_([layer.x for layer in learners], packed.split(part.sizes))
        torch._foreach_copy_([layer.out for layer in learners], mean.split(part.sizes))

    def _learning_memory(self, bucket: Bucket, part: Bucket, state: State, comm: Comm) -> State:
        """The state of ``learning`` for those that learn now; if they are others than before, joined anew."""
        memory: State = state["learning"]
        names = list(part.names)
        if memory["names"] != names:
            before = bucket.subset([bucket.names.index(name) for name in memory["names"]])
            pieces = states.cut(memory, before)
            memory = {"names": names, "inner": self.learning.init(part, comm)}
            states.paste(pieces, memory, part)
            later(state, learning=memory)
        return memory

    def _reduce_packed(
        self,
        bucket: Bucket,
        coded: "list[_Layer]",
        apart: "list[_Layer]",
        x: Tensor,
        out: Tensor,
        state: State,
        comm: Comm,
    ) -> None:
        """Everything else: what is dense, the coefficients and the losses seen, in one vector."""
        stretches = _outside(bucket, {layer.place for layer in coded + apart})
        own = scratch(state, "own", sum(layer.subspace.size for layer in coded), x.dtype, x.device)
        losses = self._encode(coded, own, state)
        lengths = [end - start for start, end in stretches]
        inside = own if isinstance(self.coefficients, Dense) else own[:0]
        message = scratch(state, "message", sum(lengths) + inside.numel() + len(losses), x.dtype, x.device)
        torch.cat([*(x[start:end] for start, end in stretches), inside, own.new_tensor(losses)], out=message)
        if message.numel():
            comm.all_reduce(message.div_(comm.size))
        *dense, mean, seen = message.split([*lengths, inside.numel(), len(losses)])
        for (start, end), part in zip(stretches, dense, strict=True):
            if out is not x:
                x[start:end].zero_()
            out[start:end].copy_(part)
        if coded and not isinstance(self.coefficients, Dense):
            own, mean = self._reduce_coefficients(bucket, own, out is x, state, comm)
        self._decode(coded, own, mean, out is x, state)
        self._note_losses(coded, seen.tolist())

    def _reduce_coefficients(
        self, bucket: Bucket, own: Tensor, in_place: bool, state: State, comm: Comm
    ) -> tuple[Tensor, Tensor]:
        """What this worker sent, and the mean of it."""
        memory = state["coefficients"]
        virtual: Bucket | None = memory.get("_bucket")
        if virtual is None or virtual.numel != own.numel():
            states.drop_scratch(memory)  # it was for another number of coefficients
            virtual = memory["_bucket"] = Bucket.flat(own.numel(), f"coefficients of {bucket.id}", bucket.seed)
        virtual.step, virtual.lr = bucket.step, bucket.lr
        rest = scratch(state, "rest", own.numel(), own.dtype, own.device).copy_(own)
        mean = rest if in_place else scratch(state, "mean", own.numel(), own.dtype, own.device)
        self.coefficients.reduce(virtual, rest, mean, memory, comm)
        return own if in_place else own.sub_(rest), mean

    # ---- coefficients ------------------------------------------------------------------------------

    def _encode(self, coded: "list[_Layer]", own: Tensor, state: State) -> list[float]:
        """The coefficients of every layer, and the loss of those that look at it in this step."""
        losses = []
        for layer, c in zip(coded, own.split([layer.subspace.size for layer in coded]), strict=True):
            slices = layer.cut(layer.x, state)
            layer.subspace.encode(slices, c)
            if self._looks(layer):
                losses.append(layer.subspace.local_loss(slices, c))
        return losses

    def _decode(self, coded: "list[_Layer]", sent: Tensor, mean: Tensor, in_place: bool, state: State) -> None:
        """``out = U c + mu`` of the mean; and ``x`` loses as much of the worker's own."""
        sizes = [layer.subspace.size for layer in coded]
        for layer, own_c, mean_c in zip(coded, sent.split(sizes), mean.split(sizes), strict=True):
            if not in_place:
                layer.join(own_c, layer.x, state, subtract=True)
            layer.join(mean_c, layer.out, state)

    # ---- phases ------------------------------------------------------------------------------------

    def _looks(self, layer: "_Layer") -> bool:
        every = max(1, self.compress // LOOKS)
        return self.drift is not None and layer.memory["count"] % every == 0

    def _note_losses(self, coded: "list[_Layer]", seen: list[float]) -> None:
        """The mean over workers of the local loss, the same on all of them; the recent ones are averaged."""
        looking = [layer for layer in coded if self._looks(layer)]
        for layer, loss in zip(looking, seen, strict=True):
            if not math.isfinite(loss):
                continue  # of gradients so large that their squares are not numbers
            known = layer.memory["local_loss"]
            recent = (known["recent"] + loss) / 2 if known else loss
            layer.loss = {"first": known.get("first", loss), "recent": recent}
            later(layer.memory, local_loss=layer.loss)

    def _advance(self, layer: "_Layer") -> None:
        """Counts a step of a phase other than learning; at its end the layer learns."""
        memory, count = layer.memory, layer.memory["count"] + 1
        drifted = self.drift is not None and layer.phase == COMPRESS and _drifted(layer.loss, self.drift, self.loss)
        refusals = memory["report"]["refusals"]
        pause = self.compress * min(2 ** max(0, refusals - 1), LONGEST_REFUSAL)
        lasts = {WARM_UP: self.warmup, COMPRESS: self.compress, REFUSED: pause}[layer.phase]
        if count >= lasts or drifted:
            report = {**memory["report"], "drifts": memory["report"]["drifts"] + drifted}
            later(memory, phase=LEARN, count=0, fit={}, local_loss={}, report=report)
        else:
            later(memory, count=count)

    # ---- learning ----------------------------------------------------------------------------------

    def _sample(self, layer: "_Layer", state: State) -> None:
        """Keeps some slices of the mean that was just received, and adds all of them to the mean of means."""
        memory, t = layer.memory, layer.memory["count"]
        if t >= self.learn:
            return  # learned; waits for its turn to be fitted
        samples, slices = memory["samples"], layer.cut(layer.out, state)
        later(memory, count=t + 1)
        later(samples, **{f"sample {t}": slices[self._sampled(layer.slicing)]})
        if t < self.fitted:
            total = torch.add(samples["total"], slices, out=spare(samples, "total")) if t else slices.clone()
            later(samples, total=total)

    def _sampled(self, cut: Slicing) -> Tensor:
        """Which slices are sampled: as many as ``samples`` allows, evenly spread; the first one always."""
        if self.basis == "slice":
            return torch.arange(cut.count)
        rows = self.samples // cut.length
        if cut.length > LARGEST_PROBLEM:
            rows = min(rows, LARGEST_PROBLEM)
        number = min(cut.count, max(1, rows // self.fitted))
        return torch.arange(number) * cut.count // number

    def _due(self, learners: "list[_Layer]") -> "list[_Layer]":
        """Whose turn it is to be fitted: one large layer in a step, or several small ones."""
        due: list[_Layer] = []
        work = 0
        for layer in learners:
            if layer.memory["count"] + 1 >= self.learn:
                rows = self.fitted * len(self._sampled(layer.slicing))
                work += min(rows, layer.slicing.length) ** 3
                if due and work > LARGEST_PROBLEM**3:
                    break
                due.append(layer)
        return due

    def _fit(self, due: "list[_Layer]", comm: Comm) -> None:
        """Rank 0 finds the bases and sends them: only the same bits everywhere make coefficients that may be added."""
        verdicts = torch.zeros(len(due), len(_VERDICT), dtype=torch.float64)
        bases: list[Tensor] = []
        if comm.rank == 0:
            for layer, verdict in zip(due, verdicts, strict=True):
                bases.append(self._find(layer, verdict))
        comm.broadcast(verdicts)
        sizes = [layer.slicing.length * self._groups(layer) * int(v[0]) for layer, v in zip(due, verdicts, strict=True)]
        packed = torch.cat([b.view(-1) for b in bases]) if bases else torch.empty(sum(sizes))
        comm.broadcast(packed)
        for layer, verdict, basis in zip(due, verdicts.tolist(), packed.split(sizes), strict=True):
            self._adopt(layer, dict(zip(_VERDICT, verdict, strict=True)), basis)

    def _groups(self, layer: "_Layer") -> int:
        return layer.slicing.count if self.basis == "slice" else 1

    def _find(self, layer: "_Layer", verdict: Tensor) -> Tensor:
        """The basis of one layer; empty if it is refused. Fills in the verdict."""
        started = time.perf_counter()
        samples, kept = _noted(layer.memory["samples"]), self._sampled(layer.slicing)
        raw = torch.stack([samples[f"sample {t}"] for t in range(self.learn)])
        rows: Tensor = raw - (samples["total"] / self.fitted)[kept]
        if not rows.isfinite().all() or not rows[: self.fitted].any():
            return rows[:0]  # a NaN in this step, sums too large, or no energy at all: there is nothing to learn
        by_slice = self.basis == "slice"
        groups = rows.transpose(0, 1) if by_slice else rows.view(1, -1, layer.slicing.length)
        fitted = self.fitted if by_slice else self.fitted * len(kept)
        basis = pca.principal_axes(groups[:, :fitted], self.loss)
        d = basis.shape[2]
        held_out = float(raw[self.fitted :].double().square().sum())
        judged = pca.energy_outside(groups[:, fitted:], basis) / held_out if held_out else math.inf
        accepted = self.worst is None or (judged <= self.worst and d <= PAYS * layer.slicing.length)
        seconds = time.perf_counter() - started
        verdict.copy_(torch.tensor([d if accepted else 0, d, judged, seconds], dtype=torch.float64))
        return basis if accepted else basis[:0]

    def _adopt(self, layer: "_Layer", verdict: dict[str, float], basis: Tensor) -> None:
        """Goes on compressed; or as it is, if the basis was refused."""
        memory, cut = layer.memory, layer.slicing
        d, known = int(verdict["sent"]), memory["report"]
        report = {
            "fits": known["fits"] + 1,
            "refusals": 0 if d else known["refusals"] + 1,
            "drifts": known["drifts"],
            "slice_length": cut.length,
            "slices": cut.count,
            "coefficients": int(verdict["found"]),
            "ratio": cut.length / max(1, verdict["found"]),
            "held_out_loss": verdict["held_out_loss"] if self.worst is not None else None,
            "fit_seconds": verdict["seconds"],
        }
        fit: State = {}
        if d:
            mean = _noted(memory["samples"])["total"] / self.fitted
            fit = dict(vars(Subspace.around(mean, basis.view(self._groups(layer), cut.length, d).clone())))
        phase = COMPRESS if d else REFUSED
        later(memory, phase=phase, count=0, samples={}, fit=fit, local_loss={}, report=report)


_VERDICT = ("sent", "found", "held_out_loss", "seconds")  # what rank 0 says about a basis


@dataclass
class _Layer:
    """One layer in one step."""

    place: int  # in the bucket
    slicing: Slicing
    memory: State
    phase: str
    x: Tensor
    out: Tensor
    loss: dict[str, float] = field(default_factory=dict)  # seen in this step

    @cached_property
    def subspace(self) -> Subspace:
        """Of a layer that is compressed."""
        return Subspace(**self.memory["fit"])

    def cut(self, x: Tensor, state: State) -> Tensor:
        """The slices of ``x``, in scratch that all layers share."""
        return self.slicing.cut(x, scratch(state, "slices", x.numel(), x.dtype, x.device))

    def join(self, c: Tensor, x: Tensor, state: State, subtract: bool = False) -> None:
        """``x = U c + mu``, or ``x -= U c + mu``."""
        slices = scratch(state, "slices", x.numel(), x.dtype, x.device)
        self.subspace.decode(c, slices)
        self.slicing.join(slices, self.subspace.mean, x, subtract)


def _drifted(loss: dict[str, float], factor: float, target: float) -> bool:
    """Whether the odds of the loss, loss / (1 - loss), have grown by more than ``factor`` since the first look.

    A loss below the target is taken for the target: it is as good as asked for. Odds tell 2 % from 6 % as well as 92 %
    from 97 %: on each worker by itself, much of a gradient is noise that no basis holds.
    """
    if not loss:
        return False

    def odds(share: float) -> float:
        share = min(max(share, target, 1e-6), 1 - 1e-6)
        return share / (1 - share)

    return odds(loss["recent"]) > factor * odds(loss["first"])


def _outside(bucket: Bucket, members: set[int]) -> list[tuple[int, int]]:
    """The stretches of a bucket between the members."""
    stretches: list[tuple[int, int]] = []
    for i, (start, end) in enumerate(zip(bucket.offsets, bucket.offsets[1:], strict=False)):
        if i in members:
            continue
        if stretches and stretches[-1][1] == start:
            stretches[-1] = (stretches[-1][0], end)
        else:
            stretches.append((start, end))
    return stretches


def _noted(state: State) -> State:
    """A state as it will be if the step is kept."""
    return {**state, **state.get("_next", {})}


def _refuse_tensors(state: State, spec: Reducer) -> None:
    """Coefficients change their number with every basis, so nothing may be kept for each of them."""
    for value in state.values():
        if isinstance(value, dict):
            _refuse_tensors(value, spec)
        elif isinstance(value, Tensor):
            raise ValueError(
                f"GradiVeQ(coefficients={spec!r}) keeps something for each element, and the number of coefficients "
                "changes. Use a method that keeps nothing, e.g. AllReduce(BF16())."
            )
