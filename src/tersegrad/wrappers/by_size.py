"""BySize: different reducers for small and large parameters."""

from dataclasses import dataclass
from typing import ClassVar

from tersegrad.core import Reducer, param, require
from tersegrad.reducers.dense import Dense
from tersegrad.wrappers._split import Split


@dataclass(frozen=True, repr=False)
class BySize(Split):
    """Sends each parameter to the reducer of the largest size that it reaches; below all sizes, uncompressed.

    BySize({10_000: A, 1_000_000: B}): uncompressed below 10,000 elements, A below a million, B from there on.
    """

    examples: ClassVar[tuple[str, ...]] = ("BySize({100: AllGather(TopK(0.2)), 1000: AllReduce(BF16())})",)

    sizes: dict[int, Reducer] = param(doc="smallest number of elements -> reducer")

    def __post_init__(self) -> None:
        require(self, "sizes", dict, "Write BySize({10000: ErrorFeedback(AllGather(TopK(0.01)))}).")
        for size, reducer in self.sizes.items():
            if type(size) is not int or size < 0 or not isinstance(reducer, Reducer):
                raise TypeError(f"BySize: {size!r}: {reducer!r} is not a rule. A rule is a number and a reducer.")

    def parts(self) -> dict[str, Reducer]:
        return {"below": Dense(), **{f"from {size}": self.sizes[size] for size in sorted(self.sizes)}}

    def part_of(self, name: str, shape: tuple[int, ...], numel: int) -> str:
        reached = [size for size in self.sizes if numel >= size]
        return f"from {max(reached)}" if reached else "below"
