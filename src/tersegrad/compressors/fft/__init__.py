"""FFT: the bins of the gradient's spectrum with the largest magnitudes.

Wang et al., "FFT-based gradient sparsification for the distributed training of deep neural networks", HPDC 2020.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.compressors._sparse import Selection, Selective, Sparse, read_front, require_int32
from tersegrad.compressors._threshold import count_of
from tersegrad.compressors._threshold import largest as top_bins
from tersegrad.compressors.fft import fourier, published
from tersegrad.compressors.fft.selection import Group, largest
from tersegrad.compressors.rangefloat import RangeFloat
from tersegrad.compressors.sidco import SIDCo
from tersegrad.compressors.topk import TopK
from tersegrad.core import (
    Compressor,
    Layout,
    Paused,
    Payload,
    State,
    Traits,
    Transformed,
    param,
    report,
    scratch,
    subtract,
)

RULES = ("ours", "paper")
SELECT = ("topk", "tensor", "sidco")
ROW = 32, 8192  # shortest and longest piece of whole rows
NO_ROWS = 64  # length of pieces if a tensor has no rows, or no fast length fits its rows


@dataclass(frozen=True, repr=False)
class FFT(Selective, Transformed):
    """Sends the k = max(1, round((1 - theta) * bins)) bins of largest magnitude of the Fourier transform.

    The vector is split into pieces of a fast length, and each piece is transformed separately: n elements have n/2 bins
    of two numbers (``fourier.py``). Payloads are summed as spectra, and one inverse transform gives their mean.

    ``chunk="row"``: a piece is one filter of a convolution or one row of a matrix. Short rows are combined, long rows
    are divided. A tensor without rows is split into pieces of 64 elements. ``chunk="tensor"``: a piece is a tensor.

    ``order="channels_last"`` reads a filter of shape (channels, height, width) as (height, width, channels), so that
    the channels of one position are neighbours. It needs whole filters; matrices and vectors keep their order.

    ``rule="paper"``: the vector is rounded to float16 and transformed as a whole, n elements have n // 2 + 1 bins, and
    positions are sent as a bitmap (``published.py``).
    """

    examples: ClassVar[tuple[str, ...]] = (
        "FFT()",
        "FFT(0.95, chunk=64, values=Identity())",
        "FFT(0.9, select='sidco', order='channels_last')",
        "FFT(0.7, chunk='tensor')",
        "FFT(0.8, select='tensor')",
        "FFT(0.85, values=RangeFloat(10, mantissa=5, high=1.0, rounding='truncate'), rule='paper')",
    )

    theta: float = param(0.85, "fraction of bins not sent: higher => fewer bytes, coarser")
    values: Compressor = param(doc="codec of the numbers sent, two per bin", factory=lambda: RangeFloat(bits=10))
    chunk: int | str = param(
        "row", 'length of the pieces: "row", "tensor" or a number; longer => blurs differences in scale'
    )
    select: str = param(
        "topk", '"topk": exactly the largest bins; "tensor": those of every tensor; "sidco": above a fitted threshold'
    )
    order: str = param("natural", 'of a filter: "natural", as in memory; "channels_last": position by position')
    rule: str = param("ours", '"paper": one transform of all, in float16; positions as a bitmap')

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.theta, bool) or not isinstance(self.theta, int | float) or not 0 <= self.theta < 1:
            raise ValueError(
                f"FFT(theta={self.theta!r}): the fraction of bins not sent is at least 0 and below 1. Write e.g. 0.85."
            )
        if self.select not in SELECT:
            raise ValueError(f"FFT(select={self.select!r}): write {', '.join(map(repr, SELECT))}.")
        if self.select == "tensor" and type(self.chunk) is int:
            raise ValueError(
                f"FFT(chunk={self.chunk}, select='tensor'): such pieces reach from one tensor into the next. "
                "Write chunk='row' or chunk='tensor'."
            )
        if self.order not in ("natural", "channels_last"):
            raise ValueError(f"FFT(order={self.order!r}): write 'natural' or 'channels_last'.")
        self._check_chunk()
        self._check_rule()

    def _check_rule(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"FFT(rule={self.rule!r}): the rules are {', '.join(map(repr, RULES))}.")
        if self.rule == "paper" and (self.chunk, self.select, self.order) != ("row", "topk", "natural"):
            raise ValueError(
                f"FFT(chunk={self.chunk!r}, select={self.select!r}, order={self.order!r}, rule='paper'): the paper "
                "transforms the vector as a whole and selects exactly. Leave out chunk, select and order."
            )

    def _check_chunk(self) -> None:
        if self.chunk == "row":
            return
        if self.order != "natural":
            raise ValueError(
                f"FFT(chunk={self.chunk!r}, order={self.order!r}): only whole filters are reordered. Write chunk='row'."
            )
        if self.chunk == "tensor":
            return
        if type(self.chunk) is not int or not 2 <= self.chunk <= fourier.LONGEST:
            raise ValueError(
                f"FFT(chunk={self.chunk!r}): the length of a piece is 'row', 'tensor' or a number from 2 to "
                f"{fourier.LONGEST}."
            )
        if not fourier.is_fast(self.chunk):
            raise ValueError(
                f"FFT(chunk={self.chunk}): transforms are fast at even lengths without prime factors above "
                f"{fourier.PRIMES[-1]}. Write e.g. chunk={fourier.fast_at_most(max(2, self.chunk))}."
            )

    def traits(self) -> Traits:
        """Rounding to float16 may leave more than there was of the smallest numbers."""
        return super().traits() if self.rule == "ours" else Traits(contracts=False)

    @property
    def _selector(self) -> Sparse:
        ratio = 1 - self.theta
        return SIDCo(ratio) if self.select == "sidco" else TopK(ratio)

    def init(self, layout: Layout, seed: int) -> State:
        """The states of selector and value codec, and the shapes that determine the pieces."""
        shapes = zip(layout.names, layout.shapes, strict=True)
        return {
            **super().init(layout, seed),
            "selector": self._selector.init(layout, seed),
            "tensors": {name: {"names": [name], "shape": list(shape)} for name, shape in shapes},
        }

    def _tensors(self, numel: int, state: State) -> list[list[fourier.Run]]:
        """How the vector is split, tensor by tensor if its tensors are known; the same on all workers."""
        split: list[list[fourier.Run]] | None = state.get("_tensors")
        if split is None:
            shapes = [tensor["shape"] for tensor in state["tensors"].values()]
            if isinstance(self.chunk, int):
                split = [fourier.split_pieces(0, numel + numel % 2, self.chunk)]
            elif self.chunk == "tensor":
                split = [[run] for run in split_tensors(shapes)]
            else:
                split = split_rows(shapes, turn=self.order == "channels_last")
            state["_tensors"] = split
        return split

    def _runs(self, numel: int, state: State) -> list[fourier.Run]:
        return [run for runs in self._tensors(numel, state) for run in runs]

    def _groups(self, numel: int, state: State) -> list[Group]:
        """What is selected from: all bins together, or every tensor's."""
        tensors = self._tensors(numel, state)
        split = tensors if self.select == "tensor" else [[run for runs in tensors for run in runs]]
        return [Group(tuple(runs), count_of(1 - self.theta, sum(run.bins for run in runs))) for runs in split if runs]

    def encoding(self, x: Tensor, state: State) -> Paused[Payload]:
        require_int32(x)
        found = None
        if x.numel() and self.rule == "ours" and self.select != "sidco" and x.device.type == "cpu":
            found = yield from largest(x, self._groups(x.numel(), state), state)
        if found is None:  # on a device all bins are compared at once: blocks would be many small launches
            found = yield from self._compared(x, state)
        if found is None:
            return Payload.nonfinite(x.numel(), state, x.device)
        chosen, picked = found
        report(state, sent=min(picked.numel(), x.numel()), of=x.numel())
        bins, bitmap = self.domain(x.numel()) // 2, self.rule == "paper"
        payload = yield from self._packing(Selection(chosen), picked, x.numel(), state, bins, bitmap)
        state["_encoded"] = payload, chosen
        return payload

    def _compared(self, x: Tensor, state: State) -> Paused[tuple[Tensor, Tensor] | None]:
        """Write all bins and compare them; None if ``x`` is non-finite."""
        bins = self.domain(x.numel()) // 2
        spectrum = scratch(state, "domain", 2 * bins, torch.float32, x.device)
        magnitudes = scratch(state, "magnitudes", bins, torch.float32, x.device)
        if not (yield from self._forward(x, spectrum, magnitudes, state)):
            return None
        chosen = yield from self._selecting(magnitudes, state)
        picked = scratch(state, "picked", 2 * chosen.numel(), torch.float32, x.device)
        kernels.on(x).gather_pairs(spectrum, chosen, picked)
        return chosen, picked

    def _forward(self, x: Tensor, spectrum: Tensor, magnitudes: Tensor, state: State) -> Paused[bool]:
        if self.rule == "paper":
            return published.forward(x, spectrum, magnitudes, state)
        return fourier.forward(x, self._runs(x.numel(), state), spectrum, magnitudes)

    def _selecting(self, magnitudes: Tensor, state: State) -> Paused[Tensor]:
        """The bins to send, by their magnitudes, which are finite."""
        if self.select != "tensor":
            selected = yield from self._selector.selecting(magnitudes, state["selector"])
            assert selected is not None, "the magnitudes of a finite vector are finite"
            return selected.positions
        groups, at = self._groups(2 * magnitudes.numel(), state), 0
        chosen = scratch(state, "chosen", sum(group.k for group in groups), torch.int32, magnitudes.device)
        for group in groups:
            part = chosen[at : at + group.k]
            part.copy_(top_bins(magnitudes[group.start : group.stop], group.k, state).positions).add_(group.start)
            at += group.k
        return chosen

    def domain(self, numel: int) -> int:
        """Two numbers per bin."""
        return published.domain(numel) if self.rule == "paper" else numel + numel % 2

    def inverse(self, acc: Tensor, out: Tensor, state: State, subtract: bool = False) -> None:
        """One inverse transform, however many payloads were summed."""
        if self.rule == "paper":
            published.inverse(acc, out, subtract)
        else:
            fourier.inverse(acc, self._runs(out.numel(), state), out, subtract)

    def decode_add(self, payload: Payload, acc: Tensor, scale: float) -> None:
        """``acc[bins] += scale * values``, O(number sent); the whole payload is checked before ``acc`` changes."""
        bins = acc.numel() // 2
        chosen, values = self._unpack(payload, bins, each=2)
        kernels.on(acc).scatter_add_pairs(acc[: 2 * bins], chosen, values, scale)


@subtract.register
def _subtract(compressor: FFT, payload: Payload, x: Tensor, state: State) -> None:
    """The positions of the last payload are in scratch, and so is a spectrum of zeros, which it is left as again."""
    encoded, chosen = state.get("_encoded", (None, None))
    if encoded is not payload or not payload.finite:
        subtract.dispatch(Transformed)(compressor, payload, x, state)
        return
    length, kernel = compressor.domain(x.numel()), kernels.on(x)
    values = scratch(state, "own values", 2 * chosen.numel(), torch.float32, x.device)
    compressor._unpack_values(payload, read_front(payload, length // 2), values)
    spectrum = scratch(state, "zeros", length, torch.float32, x.device, zeroed=True)
    pairs = spectrum[: length // 2 * 2]
    kernel.scatter_add_pairs(pairs, chosen, values, 1.0)
    compressor.inverse(spectrum, x, state, subtract=True)
    kernel.scatter_add_pairs(pairs, chosen, values, -1.0)


def piece_of_rows(row: int) -> int:
    """A fast length that is a row, a few rows, or an equal part of a row; 0 if there is none.

    >>> piece_of_rows(576), piece_of_rows(27), piece_of_rows(25088), piece_of_rows(1499)
    (576, 54, 6272, 0)
    """
    shortest, longest = ROW
    whole = range(row, longest + 1, row) if row else range(0)
    parts = (row // d for d in range(2, row // shortest + 1) if row % d == 0 and row // d <= longest)
    for length in (*(n for n in whole if n >= shortest), *parts):
        if fourier.is_fast(length):
            return length
    return 0


def split_rows(shapes: list[list[int]], turn: bool) -> list[list[fourier.Run]]:
    """Split each tensor into pieces of its own rows; neighbours without rows (biases, norms) share pieces, as one.

    Pieces begin at even positions: those of a tensor that begins at an odd position begin one element earlier.

    >>> split = split_rows([[20], [3], [64, 16, 3, 3]], turn=False)
    >>> [[(run.start, run.pieces, run.length) for run in runs] for runs in split]
    [[(0, 1, 22)], [(22, 64, 144), (9238, 1, 2)]]
    """
    split: list[list[fourier.Run]] = []
    lengths = [piece_of_rows(math.prod(shape[1:])) if len(shape) > 1 else 0 for shape in shapes]
    start = stop = 0
    for i, (shape, length) in enumerate(zip(shapes, lengths, strict=True)):
        stop += math.prod(shape)
        last = i + 1 == len(shapes)
        if last or length or lengths[i + 1]:
            end = stop + stop % 2 if last else stop - stop % 2
            positions = math.prod(shape[2:]) if turn and length else 1
            split.append(fourier.split_pieces(start, end, length or NO_ROWS, positions))
            start = end
    return split


def split_tensors(shapes: list[list[int]]) -> list[fourier.Run]:
    """Every tensor in one piece; one that begins at an odd position begins one element earlier.

    >>> [(run.start, run.length) for run in split_tensors([[20], [3], [1], [5, 7]])]
    [(0, 20), (20, 2), (22, 2), (24, 36)]
    """
    ends = [0]
    for shape in shapes:
        ends.append(ends[-1] + math.prod(shape))
    ends = [end - end % 2 for end in ends[:-1]] + [ends[-1] + ends[-1] % 2]
    return [fourier.Run(start, 1, stop - start) for start, stop in pairwise(ends) if stop > start]
