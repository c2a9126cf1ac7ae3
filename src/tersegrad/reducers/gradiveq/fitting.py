"""Learning: slices of past means are sampled, and rank 0 computes the bases that all workers adopt."""

import math
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tersegrad.core import Comm, State, back_buffer, stage, staged
from tersegrad.reducers.gradiveq import pca
from tersegrad.reducers.gradiveq.layer import COMPRESS, REFUSED, Layer
from tersegrad.reducers.gradiveq.slices import Slicing
from tersegrad.reducers.gradiveq.subspace import Subspace

if TYPE_CHECKING:
    from tersegrad.reducers.gradiveq import GradiVeQ

PAYS = 0.5  # d / K above which a layer is not worth compressing
LARGEST_PROBLEM = 1024  # rows or columns of an eigenvalue problem: larger ones take seconds
_VERDICT = ("sent", "found", "held_out_loss", "seconds")  # what rank 0 sends about a basis


def sample(spec: "GradiVeQ", layer: Layer, state: State) -> None:
    """Keep some slices of the mean that was just received, and add all of them to the mean of means."""
    memory, t = layer.memory, layer.memory["count"]
    if t >= spec.learn:
        return  # all samples are there; it waits for its turn to be fitted
    samples, slices = memory["samples"], layer.split(layer.out, state)
    stage(memory, count=t + 1)
    stage(samples, **{f"sample {t}": slices[_sampled(spec, layer.slicing)]})
    if t < spec.fitted:
        total = torch.add(samples["total"], slices, out=back_buffer(samples, "total")) if t else slices.clone()
        stage(samples, total=total)


def _sampled(spec: "GradiVeQ", slicing: Slicing) -> Tensor:
    """Which slices are sampled: as many as ``samples`` allows, evenly spaced, beginning with the first."""
    if spec.rule == "paper":
        return torch.arange(0, slicing.count, slicing.reuse(spec.basis))
    if spec.basis == "slice":
        return torch.arange(slicing.count)
    rows = spec.samples // slicing.length
    if slicing.length > LARGEST_PROBLEM:
        rows = min(rows, LARGEST_PROBLEM)
    number = min(slicing.count, max(1, rows // spec.fitted))
    return torch.arange(number) * slicing.count // number


def due(spec: "GradiVeQ", learners: list[Layer]) -> list[Layer]:
    """The layers to fit in this step: one large layer, or several small ones."""
    chosen: list[Layer] = []
    work = 0
    for layer in learners:
        if layer.memory["count"] + 1 >= spec.learn:
            work += _work(spec, layer.slicing)
            if chosen and work > LARGEST_PROBLEM**3:
                break
            chosen.append(layer)
    return chosen


def _work(spec: "GradiVeQ", slicing: Slicing) -> int:
    """Of the eigenvalue problems of a layer: the cube of their rows or columns."""
    slices = len(_sampled(spec, slicing))
    if spec.rule == "paper" or spec.basis == "slice":
        return slices * min(spec.fitted, slicing.length) ** 3
    return min(spec.fitted * slices, slicing.length) ** 3


def fit(spec: "GradiVeQ", due: list[Layer], comm: Comm) -> None:
    """Rank 0 computes and sends the bases: coefficients are summable only if all workers have the same bits."""
    verdicts = torch.zeros(len(due), len(_VERDICT), dtype=torch.float64)
    bases: list[Tensor] = []
    if comm.rank == 0:
        for layer, verdict in zip(due, verdicts, strict=True):
            bases.append(_find(spec, layer, verdict))
    comm.broadcast(verdicts)
    sizes = [layer.slicing.length * _groups(spec, layer) * int(v[0]) for layer, v in zip(due, verdicts, strict=True)]
    packed = torch.cat([b.view(-1) for b in bases]) if bases else torch.empty(sum(sizes), device=due[0].x.device)
    comm.broadcast(packed)
    for layer, verdict, basis in zip(due, verdicts.tolist(), packed.split(sizes), strict=True):
        _adopt(spec, layer, dict(zip(_VERDICT, verdict, strict=True)), basis)


def _groups(spec: "GradiVeQ", layer: Layer) -> int:
    return layer.slicing.count if spec.basis == "slice" else 1


def _find(spec: "GradiVeQ", layer: Layer, verdict: Tensor) -> Tensor:
    """The basis of one layer, empty if it is rejected; also fills in the verdict."""
    started = time.perf_counter()
    samples, kept = staged(layer.memory["samples"]), _sampled(spec, layer.slicing)
    raw = torch.stack([samples[f"sample {t}"] for t in range(spec.learn)])
    rows: Tensor = raw - (samples["total"] / spec.fitted)[kept]
    if not rows.isfinite().all() or not rows[: spec.fitted].any():
        return rows[:0]  # a NaN in this step, an overflow, or no energy: there is nothing to learn
    by_slice = spec.basis == "slice"
    groups = rows.transpose(0, 1) if by_slice else rows.view(1, -1, layer.slicing.length)
    fitted = spec.fitted if by_slice else spec.fitted * len(kept)
    basis = pca.principal_axes(groups[:, :fitted], spec.loss)
    d = basis.shape[2]
    held_out = float(raw[spec.fitted :].double().square().sum())
    judged = pca.energy_outside(groups[:, fitted:], basis) / held_out if held_out else math.inf
    accepted = spec.worst is None or (judged <= spec.worst and d <= PAYS * layer.slicing.length)
    seconds = time.perf_counter() - started
    verdict.copy_(torch.tensor([d if accepted else 0, d, judged, seconds], dtype=torch.float64))
    return basis if accepted else basis[:0]


def _adopt(spec: "GradiVeQ", layer: Layer, verdict: dict[str, float], basis: Tensor) -> None:
    """Start the compressed phase; or an uncompressed one, if the basis was rejected."""
    slicing, d = layer.slicing, int(verdict["sent"])
    fit: State = {}
    if d:
        mean = staged(layer.memory["samples"])["total"] / spec.fitted
        fit = dict(vars(Subspace.around(mean, basis.view(_groups(spec, layer), slicing.length, d).clone())))
    held_out = verdict["held_out_loss"] if spec.worst is not None else None
    adopt(layer, fit, verdict["found"], held_out, verdict["seconds"])


def adopt(layer: Layer, fit: State, found: float, held_out: float | None, seconds: float) -> None:
    """Start the phase that follows learning: a compressed one with this fit, or an uncompressed one if it is empty."""
    slicing, known = layer.slicing, layer.memory["report"]
    figures = {
        "fits": known["fits"] + 1,
        "refusals": 0 if fit else known["refusals"] + 1,
        "drifts": known["drifts"],
        "slice_length": slicing.length,
        "slices": slicing.count,
        "coefficients": int(found),
        "ratio": slicing.length / max(1, found),
        "held_out_loss": held_out,
        "fit_seconds": seconds,
    }
    phase = COMPRESS if fit else REFUSED
    stage(layer.memory, phase=phase, count=0, samples={}, fit=fit, local_loss={}, report=figures)
