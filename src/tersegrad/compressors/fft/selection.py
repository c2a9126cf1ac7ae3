"""The largest bins of a vector, found block by block while a block is in the cache.

A threshold is guessed from the spectra of some pieces, so that little more than the k largest bins pass it. A bad guess
costs time, never exactness: ``largest`` says that it has not found them, and all bins are written and compared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors.fft import fourier
from tersegrad.core import Paused, State, scratch
from tersegrad.kernels.ops import bin_capacity, top_k_capacity

EVERY = 128  # one piece of so many is transformed for the guess
FEWEST = 8  # pieces of a run, if it has more than these
MARGIN = 1.1  # candidates for each bin sought


@dataclass(frozen=True)
class Group:
    """Consecutive runs, and how many of their bins are sent."""

    runs: tuple[fourier.Run, ...]
    k: int

    @property
    def start(self) -> int:
        """The first bin."""
        return self.runs[0].start // 2

    @property
    def stop(self) -> int:
        """The bin after the last."""
        return self.runs[-1].stop // 2


def largest(x: Tensor, groups: list[Group], state: State) -> Paused[tuple[Tensor, Tensor] | None]:
    """The positions of the k largest bins of every group, ascending, and their numbers; None if they were not found.

    They are in scratch.
    """
    room = max(bin_capacity(group.stop - group.start, group.k) for group in groups)
    candidates = (
        scratch(state, "positions", room, torch.int32, x.device),
        scratch(state, "keys", room, torch.int32, x.device),
        scratch(state, "numbers", 2 * room, torch.float32, x.device),
    )
    total = sum(group.k for group in groups)
    chosen, picked = candidates[0][:total], candidates[2][: 2 * total]
    if len(groups) > 1:
        chosen = scratch(state, "chosen", total, torch.int32, x.device)
        picked = scratch(state, "picked", 2 * total, torch.float32, x.device)
    found, at = [], 0
    for group in groups:
        progress = _guess(x, group, state)
        if progress is None:
            return None
        found.append(_collected(x, group, progress, candidates))
        if len(groups) > 1:
            chosen[at : at + group.k].copy_(candidates[0][: group.k])
            picked[2 * at : 2 * (at + group.k)].copy_(candidates[2][: 2 * group.k])
        at += group.k
    counts = yield tuple(found)
    return (chosen, picked) if all(n == group.k for n, group in zip(counts, groups, strict=True)) else None


def _collected(x: Tensor, group: Group, progress: Tensor, candidates: tuple[Tensor, Tensor, Tensor]) -> kernels.Answer:
    """Leave the k largest bins in front of the candidates; the answer is k if they were found."""
    kernel = kernels.on(x)
    for run in group.runs:
        for block in run.blocks():
            half = torch.fft.rfft(fourier.read(x, block), norm="ortho")
            kernel.collect_bins(half, block.start // 2, group.k, progress, *candidates)
    answer: kernels.Answer = kernel.choose_bins(group.k, progress, *candidates)
    return answer


def _guess(x: Tensor, group: Group, state: State) -> Tensor | None:
    """The progress to begin with: no candidate, and a key that about ``MARGIN`` k of the bins reach.

    Few bins need no guess. None if too few of many bins are in pieces to draw from, or if one of these is non-finite.
    """
    bins, progress = group.stop - group.start, torch.zeros(3, dtype=torch.int64, device=x.device)
    if bin_capacity(bins, group.k) > bins:
        return progress
    drawn = [run for run in group.runs if run.pieces > FEWEST]
    if 2 * sum(run.bins for run in drawn) < bins:
        return None
    parts = []
    for run in drawn:
        half = torch.fft.rfft(_draw(x, run, state), norm="ortho")
        bins_, magnitudes = (torch.empty(n * half.shape[0] * run.length // 2, device=x.device) for n in (2, 1))
        kernels.on(x).fold(half, bins_, magnitudes)
        parts.append(magnitudes)
    sample = torch.cat(parts)
    if not bool(sample.isfinite().all()):
        return None
    share = group.k / bins * sample.numel()
    rank = min(sample.numel(), int(MARGIN * share + 3 * share**0.5) + 3)
    indices = torch.empty(rank, dtype=torch.int32, device=x.device)
    kernels.on(x).top_k(sample, rank, indices, indices.new_empty(top_k_capacity(sample.numel(), rank)))
    progress[1] = sample.view(torch.int32)[indices].min()
    return progress


def _draw(x: Tensor, run: fourier.Run, state: State) -> Tensor:
    """One random piece of every ``EVERY``, the same ones in every step; not the last, which may be padded."""
    key, pieces = f"_drawn {run.start}", run.pieces - 1
    if key not in state:
        every = min(EVERY, pieces // FEWEST)
        slices = torch.arange(pieces // every)
        state[key] = (slices * every + (slices * 2654435769 >> 7) % every).to(x.device)
    part = x[run.start :][: pieces * run.length].view(pieces, run.length).index_select(0, state[key])
    return fourier.Run(0, part.shape[0], run.length, run.positions).as_lines(part).reshape(part.shape)
