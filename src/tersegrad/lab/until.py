"""``--until 'accuracy >= 0.9'``: a score at which a run is over."""

import operator
import re
from dataclasses import dataclass

_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_FORM = re.compile(
    r"\s*(?P<metric>\w[\w ./%-]*?)\s*(?P<operator>>=|<=|>|<)\s*(?P<value>[-+.\deE]+)\s*(?P<percent>%?)\s*"
)


@dataclass(frozen=True)
class Until:
    """A comparison of a metric with a number."""

    metric: str
    operator: str
    value: float

    @staticmethod
    def parse(text: str) -> "Until":
        """
        >>> Until.parse("accuracy >= 90%")
        Until(metric='accuracy', operator='>=', value=0.9)
        """
        match = _FORM.fullmatch(text)
        try:
            assert match is not None
            value = float(match["value"]) / (100 if match["percent"] else 1)
        except (AssertionError, ValueError):
            raise ValueError(
                f"--until {text!r}: write a metric, one of >=, <=, > and <, and a number: 'accuracy >= 0.9'."
            ) from None
        return Until(match["metric"], match["operator"], value)

    def require(self, metric: str) -> None:
        """The metric must be the one that is evaluated."""
        if metric != self.metric:
            raise ValueError(f"--until {self}: what is evaluated is called {metric!r}.")

    def holds(self, score: float) -> bool:
        """Whether a score is there."""
        return bool(_OPERATORS[self.operator](score, self.value))

    def __str__(self) -> str:
        return f"{self.metric} {self.operator} {self.value:g}"
