"""ByDimension: different reducers for vectors, matrices and convolutions."""

from dataclasses import dataclass
from typing import ClassVar

from tersegrad.core import Reducer, param, require
from tersegrad.reducers.dense import Dense
from tersegrad.wrappers._split import Split


@dataclass(frozen=True, repr=False)
class ByDimension(Split):
    """Sends each parameter to the reducer for its number of dimensions: 1 bias or norm, 2 matrix, 4 convolution.

    Policies compose: ByDimension({2: BySize({10_000: PowerSGD(4)}), 4: GradiVeQ()}).
    """

    examples: ClassVar[tuple[str, ...]] = (
        "ByDimension({2: BySize({1000: ErrorFeedback(AllGather(TopK(0.2)))}), 4: AllGather(QSGD(8))})",
    )

    dimensions: dict[int, Reducer] = param(doc="number of dimensions -> reducer of such parameters")
    default: Reducer = param(doc="reducer of all other parameters", factory=Dense)

    def __post_init__(self) -> None:
        require(self, "dimensions", dict, "Write ByDimension({2: ErrorFeedback(PowerSGD(2))}).")
        require(self, "default", Reducer, "Write e.g. default=Dense().")
        for number, reducer in self.dimensions.items():
            if type(number) is not int or number < 0 or not isinstance(reducer, Reducer):
                raise TypeError(
                    f"ByDimension: {number!r}: {reducer!r} is not a rule. A rule is a number and a reducer."
                )

    def parts(self) -> dict[str, Reducer]:
        return {**{f"{number}d": reducer for number, reducer in self.dimensions.items()}, "default": self.default}

    def part_of(self, name: str, shape: tuple[int, ...], numel: int) -> str:
        return f"{len(shape)}d" if len(shape) in self.dimensions else "default"
