"""Learning by the paper's own rule: every worker computes the same bases, from the first slice of a group alone.

A group is ``s`` consecutive slices of a layer, s the reuse factor. Its basis is that of the first one's samples, all of
them, with as many columns as their energy takes. Nothing is sent but a digest, so that workers whose arithmetic differs
are found.
"""

import hashlib
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tersegrad.core import Comm, State, staged
from tersegrad.reducers.gradiveq import fitting, pca
from tersegrad.reducers.gradiveq.layer import Layer
from tersegrad.reducers.gradiveq.subspace import Subspace

if TYPE_CHECKING:
    from tersegrad.reducers.gradiveq import GradiVeQ


def fit(spec: "GradiVeQ", due: list[Layer], comm: Comm) -> None:
    """Compute the bases of these layers, and see that all workers have the same bits."""
    found = [_find(spec, layer) for layer in due]
    _compare(spec, [fit for fit, _ in found], comm)
    for layer, (fit, seconds) in zip(due, found, strict=True):
        slicing = layer.slicing
        size = sum(part["offset"].numel() for part in fit.values()) if fit else slicing.length * slicing.count
        fitting.adopt(layer, fit, size / slicing.count, None, seconds)


def _find(spec: "GradiVeQ", layer: Layer) -> tuple[State, float]:
    """The subspace of every group, and seconds; none if there is a group without energy: it has nothing to learn."""
    started, slicing = time.perf_counter(), layer.slicing
    samples = staged(layer.memory["samples"])
    raw = torch.stack([samples[f"sample {t}"] for t in range(spec.learn)], dim=1)  # (groups, samples, K)
    mean = samples["total"] / spec.learn
    fit: State = {}
    each = slicing.reuse(spec.basis)
    for i, first in enumerate(range(0, slicing.count, each)):
        rows = raw[i] - mean[first]
        if not rows.isfinite().all() or not rows.any():
            return {}, time.perf_counter() - started
        basis = pca.principal_axes(rows[None], spec.loss)
        own = mean[first : first + each].clone()
        fit[f"group {i}"] = dict(vars(Subspace.around(own, basis)))
    return fit, time.perf_counter() - started


def _compare(spec: "GradiVeQ", fits: list[State], comm: Comm) -> None:
    """Raise RuntimeError, on all workers, if any two have other bits."""
    found = hashlib.blake2b(digest_size=16)
    for fit in fits:
        found.update(b"layer")
        for part in fit.values():
            for key in ("basis", "mean"):
                found.update(str(tuple(part[key].shape)).encode() + _bytes(part[key]))
    digests = [
        bytes(d.tolist()) for d in comm.all_gather(torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8))
    ]
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise RuntimeError(
            f"{spec!r}: rank {', '.join(map(str, other))} computed other bases than rank 0, and coefficients of "
            "different bases cannot be added. Every worker fits by itself, which needs the same samples, linear "
            "algebra library, instruction set and number of threads on all. Write rule='ours': rank 0 sends its bases."
        )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
