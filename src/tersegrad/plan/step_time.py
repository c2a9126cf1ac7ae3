"""The predicted time of a simulated run's steps: the planner's model, with the bytes that were really sent."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from tersegrad.core import Layout, Reducer
from tersegrad.plan import codecs
from tersegrad.plan.advice import Prediction, Setting, predict
from tersegrad.plan.codecs import BucketCost, Network
from tersegrad.plan.cost import Link
from tersegrad.plan.timeline import Compute

OVERHEAD = 5e-5  # seconds to start one message: gloo from Python, roughly


@dataclass(frozen=True)
class StepTime:
    """One spec on one network. Codecs are timed on this machine; a step's bytes are given by the run.

    Args:
        workers: How many.
        link: Every worker's.
        compute: A step without communication.
        costs: Of the spec, one per bucket, after its warm-up.
    """

    workers: int
    link: Link
    compute: Compute
    costs: tuple[BucketCost, ...]

    @staticmethod
    def measured(
        spec: Reducer,
        buckets: Sequence[Layout],
        gradients: Sequence[Tensor],
        workers: int,
        link: Link,
        compute: Compute,
    ) -> "StepTime":
        """Times the spec's codecs on these gradients."""
        return StepTime(workers, link, compute, tuple(codecs.measure_all(spec, buckets, gradients)))

    def seconds(self, sent: float) -> float:
        """A step in which a worker sends so many bytes; codecs take their usual time."""
        usual = self._predict(self.costs).sent
        factor = sent / usual if usual else 0.0
        return self._predict([_scaled(cost, factor) for cost in self.costs]).step

    def _predict(self, costs: Sequence[BucketCost]) -> Prediction:
        network = Network(self.link, replace(self.link, overhead=OVERHEAD))
        return predict("", costs, Setting(self.workers, network, self.compute))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> "StepTime":
        """What ``as_dict`` gave."""
        costs = (
            BucketCost(**{**c, "messages": tuple((kind, nbytes) for kind, nbytes in c["messages"])})
            for c in saved["costs"]
        )
        compute = Compute(**{**saved["compute"], "ready": tuple(saved["compute"]["ready"])})
        return StepTime(saved["workers"], Link(**saved["link"]), compute, tuple(costs))


def _scaled(cost: BucketCost, factor: float) -> BucketCost:
    return replace(cost, messages=tuple((kind, round(factor * nbytes)) for kind, nbytes in cost.messages))
