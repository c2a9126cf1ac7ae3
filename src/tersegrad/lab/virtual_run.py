"""One simulated run: its file of JSON lines, its snapshots, and where it goes on after it was killed.

Started by ``tersegrad simulate`` as a process of its own, or called by ``tersegrad.simulate``.
"""

import errno
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tersegrad.hosts import Simulation
from tersegrad.hosts.training import make
from tersegrad.lab import factories
from tersegrad.lab.factories import Factory
from tersegrad.lab.until import Until
from tersegrad.plan.step_time import StepTime
from tersegrad.specs import load_module


@dataclass(frozen=True)
class RunConfig:
    """The complete description of one simulated run."""

    spec: str
    workers: int
    steps: int
    seed: int
    file: str
    start: dict[str, Any]  # the first line of the file; its "identity" decides the result
    eval_every: int
    log_every: int
    until: str | None = None
    snapshot_seconds: float = 180.0
    step_time: dict[str, Any] | None = None  # StepTime.as_dict(); None: no network was given
    decisions: list[dict[str, Any]] | None = None  # that auto follows
    source: dict[str, Any] | None = None  # arguments of factories.find; None: the factory is given
    modules: tuple[str, ...] = ()  # where methods come from that are not tersegrad's
    threads: int = 1
    processes: int = 1  # that compute gradients
    bucket_cap_mb: int | None = None


class VirtualRun:
    """A simulation that writes down what happens, and can be killed at any moment."""

    def __init__(self, config: RunConfig, factory: Factory):
        self._config = config
        known = {"seed": config.seed, "workers": config.workers, "steps": config.steps, "spec": config.spec}
        self._simulation = Simulation(
            make(factory, **known),
            config.spec,
            config.workers,
            seed=config.seed,
            decisions=config.decisions,
            processes=config.processes,
            bucket_cap_mb=config.bucket_cap_mb,
        )
        self._file, self._snapshot = Path(config.file), Path(config.file).with_suffix(".snapshot")
        self._until = None if config.until is None else Until.parse(config.until)
        self._step_time = None if config.step_time is None else StepTime.from_dict(config.step_time)
        self._predicted = 0.0  # seconds of training so far
        self._sent = 0.0  # bytes at the last line
        self._logged = 0  # step of the last line
        self._wall = 0.0  # seconds before this process
        self._score: float | None = None
        self._loss = math.nan

    def run(self) -> None:
        """From the last snapshot, or from the beginning, to the end."""
        try:
            with _room_for(self._file, self._simulation), self._opened() as out:
                self._began = self._saved = time.perf_counter()
                self._train(out)
                self._snapshot.unlink(missing_ok=True)
        finally:
            self._simulation.close()

    def _train(self, out: Any) -> None:
        config, simulation = self._config, self._simulation
        because = "steps"
        while simulation.steps < config.steps:
            due = (simulation.steps + 1) % config.log_every == 0
            self._loss = simulation.step(weigh=due)
            if not math.isfinite(self._loss):
                because, self._score = "diverged", None
                break
            if due:
                self._log(out)
            if simulation.steps % config.eval_every == 0 and self._reached(out):
                because = "until"
                break
            if time.perf_counter() - self._saved > config.snapshot_seconds:
                self._save(out)
        if because == "steps" and simulation.training.evaluate is not None and simulation.steps % config.eval_every:
            self._evaluate(out)
        decisions = simulation.metrics()["decisions"]
        self._account()
        self._write(out, "end", score=self._score, because=because, **({"decisions": decisions} if decisions else {}))

    def _reached(self, out: Any) -> bool:
        if self._simulation.training.evaluate is None:
            return False
        self._evaluate(out)
        return self._until is not None and self._score is not None and self._until.holds(self._score)

    def _evaluate(self, out: Any) -> None:
        self._account()
        self._score = self._simulation.evaluate()
        score = self._score if math.isfinite(self._score) else None
        self._write(out, "eval", epoch=self._simulation.epochs, score=score)

    def _log(self, out: Any) -> None:
        self._account()
        metrics = self._simulation.metrics()
        unknown = dict.fromkeys(("encode", "wait", "decode"))
        figures = {"density": metrics["density"], "waiting": self._simulation.waiting}
        self._write(out, "step", loss=self._loss, accounted=round(self._sent), **unknown, **figures)

    def _account(self) -> None:
        """Bytes of the steps since the last line, and their predicted time."""
        steps = self._simulation.steps - self._logged
        if steps:
            sent = self._simulation.metrics()["bytes_sent"]
            if self._step_time is not None:
                self._predicted += steps * self._step_time.seconds((sent - self._sent) / steps)
            self._sent, self._logged = sent, self._simulation.steps

    def _write(self, out: Any, event: str, **values: Any) -> None:
        wall = self._wall + time.perf_counter() - self._began
        seconds = None if self._step_time is None else self._predicted
        about = {"step": self._simulation.steps, "seconds": seconds, "wall": wall, "sent": round(self._sent)}
        out.write(json.dumps({"event": event, **about, **values}) + "\n")
        out.flush()

    # ---- snapshots ---------------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The file, cut off where the last snapshot was made."""
        saved = self._load()
        if saved is None:
            with self._file.open("w") as out:
                out.write(json.dumps({"event": "start", **self._config.start}) + "\n")
                out.flush()
                yield out
            return
        with self._file.open("r+") as out:
            out.seek(saved["position"])
            out.truncate()
            yield out

    def _load(self) -> dict[str, Any] | None:
        if not self._snapshot.exists() or not self._file.exists():
            return None
        saved: dict[str, Any] = torch.load(self._snapshot, weights_only=False)
        if saved["identity"] != self._config.start["identity"]:
            return None
        self._simulation.load_state_dict(saved["simulation"])
        self._predicted, self._sent, self._logged = saved["predicted"], saved["sent"], saved["logged"]
        self._wall, self._score = saved["wall"], saved["score"]
        if saved["step_time"] is not None:
            self._step_time = StepTime.from_dict(saved["step_time"])
        return saved

    def _save(self, out: Any) -> None:
        """Written beside the one before, which it then replaces: there is always a whole one."""
        self._saved = time.perf_counter()
        state = {
            "identity": self._config.start["identity"],
            "simulation": self._simulation.state_dict(),
            "position": out.tell(),
            "predicted": self._predicted,
            "sent": self._sent,
            "logged": self._logged,
            "wall": self._wall + time.perf_counter() - self._began,
            "score": self._score,
            "step_time": None if self._step_time is None else self._step_time.as_dict(),
        }
        beside = self._snapshot.with_suffix(".partial")
        try:
            with beside.open("wb") as whole:
                torch.save(state, whole)
                whole.flush()
                os.fsync(whole.fileno())
            beside.replace(self._snapshot)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


@contextmanager
def _room_for(file: Path, simulation: Simulation) -> Iterator[None]:
    """Says what a full disk means for the run."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if not full and not isinstance(error.__context__, OSError):
            raise
        raise OSError(
            f"{file} could not be written in step {simulation.steps}: {error.__context__ or error}. Finished runs and "
            "the last snapshot of this one are kept: make room on the disk, and the same command goes on from there."
        ) from error


def main() -> None:
    """Makes the runs that the file in the argument describes, one after the other."""
    configs = [
        RunConfig(**{**raw, "modules": tuple(raw["modules"])}) for raw in json.loads(Path(sys.argv[1]).read_text())
    ]
    torch.set_num_threads(configs[0].threads)
    for module in configs[0].modules:
        load_module(module)
    for config in configs:
        assert config.source is not None
        source = {**config.source, "data": None if config.source["data"] is None else Path(config.source["data"])}
        try:
            VirtualRun(config, factories.find(**source)).run()
        except (ValueError, TypeError, OSError) as error:
            raise SystemExit(f"{config.spec}, seed {config.seed}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
