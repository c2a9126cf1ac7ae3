"""One virtual worker's batches, epoch after epoch, with a random generator of their own; resumable."""

from collections.abc import Iterator
from typing import Any

import torch

from tersegrad.hosts._randomness import Randomness, undisturbed
from tersegrad.hosts.training import Batches


class BatchStream:
    """Batches of one worker. What they draw at random is theirs alone, so that skipping some draws it again."""

    def __init__(self, batches: Batches, worker: int, workers: int, seed: int):
        self._batches = batches
        self._worker, self._workers = worker, workers
        self.epoch = 0
        self.done = 0  # batches of this epoch that were given
        self.lengths: list[int] = []  # of the epochs before
        self._random = Randomness.seeded(seed)
        self._at_start = self._random.copy()  # of this epoch
        self._iterator: Iterator[Any] | None = None

    def next(self) -> Any:
        """The next batch; the first of the next epoch after the last of this one."""
        with self._random.used():
            if self._iterator is None:
                self._iterator = self._open()
            try:
                batch = next(self._iterator)
            except StopIteration:
                batch = self._first_of_next_epoch()
        self.done += 1
        return batch

    def _open(self) -> Iterator[Any]:
        given = self._batches(self._worker, self._workers, self.epoch)
        try:
            return iter(given)
        except TypeError:
            raise TypeError(
                f"batches({self._worker}, {self._workers}, {self.epoch}) gave a {type(given).__name__}, which has no "
                "batches to iterate over. Give a DataLoader, a list or a generator."
            ) from None

    def _first_of_next_epoch(self) -> Any:
        if self.done == 0:
            raise ValueError(
                f"batches({self._worker}, {self._workers}, {self.epoch}) gave no batch at all: the data do not fill "
                "one on each worker, or an iterator was given that is used up. Make a new one in every call."
            )
        self.lengths.append(self.done)
        self.epoch, self.done = self.epoch + 1, 0
        self._at_start = Randomness.now()
        self._iterator = self._open()
        try:
            return next(self._iterator)
        except StopIteration:
            return self._first_of_next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is."""
        about = {"epoch": self.epoch, "done": self.done, "lengths": list(self.lengths)}
        return {**about, "at_start": self._at_start.state_dict(), "random": self._random.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Goes on where the stream was: the batches of the epoch so far are drawn again."""
        self.epoch, self.done, self.lengths = saved["epoch"], saved["done"], list(saved["lengths"])
        self._at_start, now = Randomness(**saved["at_start"]), Randomness(**saved["random"])
        self._random, self._iterator = self._at_start.copy(), None
        if not self.done:
            return
        with undisturbed(), self._random.used():
            self._iterator = self._open()
            for given in range(self.done):
                if next(self._iterator, self) is self:
                    raise ValueError(
                        f"batches({self._worker}, {self._workers}, {self.epoch}) has only {given} batches now, and "
                        f"{self.done} were given before: the data have changed. Begin a new run."
                    )
        if not torch.equal(self._random.torch, now.torch):
            raise ValueError(
                f"batches({self._worker}, {self._workers}, {self.epoch}) did not draw the same random numbers again, "
                "so the run cannot go on to the bit. All that it draws must follow from its three arguments or from "
                "torch's global generator."
            )
