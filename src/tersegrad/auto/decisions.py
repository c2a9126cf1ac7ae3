"""What Auto has measured and all workers agreed on, in order; and what it is told instead where a run is replayed."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tersegrad.auto.choice import Measured, Trial, agree
from tersegrad.core import Comm

_KEY = "auto decisions"


class Decisions:
    """The measurements that Auto's choices follow from, over one Comm. The same on all workers.

    Args:
        replayed: What another run made; Auto then chooses as it did there, step by step.
    """

    def __init__(self, replayed: Iterable[Mapping[str, Any]] | None = None):
        self.made: list[dict[str, Any]] = []
        self._replayed = None if replayed is None else {(d["step"], d["bucket"]): Trial(**d["trial"]) for d in replayed}

    @staticmethod
    def of(comm: Comm) -> "Decisions":
        """Those over this Comm."""
        decisions: Decisions = comm.shared.setdefault(_KEY, Decisions())
        return decisions

    def put(self, comm: Comm) -> None:
        """Auto uses these from now on, over this Comm."""
        comm.shared[_KEY] = self

    def agree(self, measured: Measured, comm: Comm, number: int, bucket: int, usual: Mapping[str, float]) -> Trial:
        """Combines every worker's numbers; in a replay the bytes travel too, and the numbers of the log count.

        Args:
            measured: By this worker.
            comm: The way to the others.
            number: Of the step.
            bucket: Its id.
            usual: Times since the choice, if it was made: they go on where the log ends.
        """
        agreed = agree(measured, comm)
        if self._replayed is not None:
            agreed = self._known(number, bucket, usual)
        self.made.append({"step": number, "bucket": bucket, "trial": asdict(agreed)})
        return agreed

    def _known(self, number: int, bucket: int, usual: Mapping[str, float]) -> Trial:
        assert self._replayed is not None
        if (number, bucket) in self._replayed:
            return self._replayed[number, bucket]
        last = max((step for step, _ in self._replayed), default=-1)
        if usual and number > last:
            return Trial(seconds=0.0, wait=usual["wait"], step=usual["step"], slack=0.0, left=0.0)
        raise ValueError(
            f"step {number}: the log of decisions has no measurement of bucket {bucket} in this step"
            + (f"; it ends with step {last}" if number > last else "")
            + ". It must be of the same model, spec and number of workers, and reach to the end of auto's trials."
        )
