"""ByName: different reducers for different parameters; biases, norms and tiny tensors stay dense."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from tersegrad.core import Reducer, param, require
from tersegrad.reducers.dense import Dense
from tersegrad.wrappers._split import Split


@dataclass(frozen=True, repr=False)
class ByName(Split):
    """Sends each parameter to the reducer of the first pattern that its name matches (``*`` as in file names).

    Of the parameters that no pattern matches, vectors (biases, norms) and those of fewer than ``tiny`` elements are not
    compressed, because they are few bytes and sensitive; the others go to ``default``.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "ByName({'*c*': AllGather(TopK(0.1))}, default=ErrorFeedback(AllGather(TopK(0.2))), tiny=0)",
        "ByName({}, default=AllGather(TopK(0.1)))",
    )

    rules: dict[str, Reducer] = param(doc="pattern -> reducer, tried in order")
    default: Reducer = param(doc="reducer of large parameters that no pattern matches", factory=Dense)
    tiny: int = param(1024, "smaller tensors are not compressed; 0: no exception for vectors and small tensors")

    def __post_init__(self) -> None:
        require(self, "rules", dict, "Write ByName({'*.weight': AllGather(TopK(0.01))}, default=Dense()).")
        require(self, "default", Reducer, "Write e.g. default=ErrorFeedback(AllGather(TopK(0.01))).")
        for pattern, reducer in self.rules.items():
            if not isinstance(pattern, str) or not isinstance(reducer, Reducer):
                raise TypeError(f"ByName: {pattern!r}: {reducer!r} is not a rule. A rule is a pattern and a reducer.")
        if self.tiny < 0:
            raise ValueError(f"ByName(tiny={self.tiny!r}): the number of elements must not be negative.")

    def parts(self) -> dict[str, Reducer]:
        return {**{f"rule {p}": r for p, r in self.rules.items()}, "tiny": Dense(), "default": self.default}

    def part_of(self, name: str, shape: tuple[int, ...], numel: int) -> str:
        """The first rule that matches; otherwise "tiny" or "default"."""
        for pattern in self.rules:
            if fnmatchcase(name, pattern):
                return f"rule {pattern}"
        return "tiny" if self.tiny and (len(shape) < 2 or numel < self.tiny) else "default"
