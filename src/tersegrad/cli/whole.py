"""A whole method, run by two workers of this process past its beginning: bytes, times, and the error of its mean."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tersegrad.auto import Auto
from tersegrad.comm.metered import Metered
from tersegrad.comm.torch import NetworkError
from tersegrad.comm.virtual import Hub, VirtualComm
from tersegrad.core import Compressor, Reducer, Spec, State, Step, contribution, settled
from tersegrad.core import state as states
from tersegrad.plan.made_up import Gradients
from tersegrad.reducers import AllGather, AllReduce, GradiVeQ, Ring, TwoShot
from tersegrad.specs import parse
from tersegrad.wrappers import ErrorFeedback

WORKERS = 2  # then every exchange sends its payload once, and a worker's bytes are those of one payload
STEPS = 30  # before anything is measured: adaptive methods find their place, and a residual builds up
ANY = 1e9  # share of the energy that a basis may miss: as much as it likes
EXCHANGES = (AllGather, AllReduce, Ring, TwoShot)


def expand(text: str) -> dict[str, Spec]:
    """What is shown for a spec, each as it is past its beginning: Auto's candidates, or the spec itself.

    >>> expand("Auto({'bf16': AllReduce(BF16())})")
    {"Auto({'bf16': AllReduce(BF16())}): bf16": ErrorFeedback(AllReduce(BF16()))}
    """
    spec = parse(text)
    if isinstance(spec, Auto):
        return {f"{text}: {name}": ErrorFeedback(one) for name, one in spec.candidates.items()}
    return {text: _begun(settled(spec)) if isinstance(spec, Reducer) else spec}


def codec_of(spec: Spec) -> Compressor | None:
    """The compressor that a spec sends with, if it does nothing else but error feedback; None for whole methods.

    >>> codec_of(parse("topk")), codec_of(parse("vgc"))
    (TopK(ratio=0.01), None)
    """
    if isinstance(spec, ErrorFeedback) and spec.clip is None:
        spec = spec.inner
    if isinstance(spec, EXCHANGES):
        return spec.compressor
    return spec if isinstance(spec, Compressor) else None


def _begun(value: Any) -> Any:
    """The same, but GradiVeQ learns its bases at once, and compresses with them whatever they miss."""
    if isinstance(value, dict):
        return {key: _begun(child) for key, child in value.items()}
    if not isinstance(value, Reducer):
        return value
    changed = {f.name: _begun(getattr(value, f.name)) for f in fields(value)}  # type: ignore[arg-type]
    if isinstance(value, GradiVeQ):
        changed |= {"warmup": 0, "drift": None, "worst": None if value.worst is None else ANY}
    return replace(value, **changed)  # type: ignore[type-var]


def _steps_before(spec: Spec) -> int:
    """Until adaptive methods have found their place, and GradiVeQ has its bases."""
    return max([STEPS, *(part.learn + 2 for part in spec.walk() if isinstance(part, GradiVeQ))])


@dataclass(frozen=True)
class Measured:
    """One step of one worker."""

    encode: float  # ms before its first message
    decode: float  # ms after it, without the time in which it waits
    nbytes: int
    said: list[dict[str, Any]]  # what the method reports about itself
    total: Tensor  # gradient and residual
    left: Tensor  # what of it was not sent


class Whole:
    """A reducer with the states of all workers; they run in threads that take turns, so that times are of one core."""

    def __init__(self, reducer: Reducer, gradients: Gradients):
        self.reducer, self.gradients = reducer, gradients
        hub = Hub(WORKERS)
        hub.compares = True  # every worker decodes by itself
        self._hub = hub
        self._comms = [VirtualComm(hub, rank) for rank in range(WORKERS)]
        self._states: list[State] = _together(hub, lambda rank: reducer.init(gradients.layout, self._comms[rank]))
        self.steps = 0
        for _ in range(_steps_before(reducer)):
            self.step(weigh=False)

    def step(self, weigh: bool = True) -> Measured:
        """One step of all workers; what the first one measured. ``weigh``: with the means of totals and of rests."""
        workers: list[Measured] = _together(self._hub, lambda rank: self._step(rank, weigh))
        self.steps += 1
        total, left = (torch.stack([getattr(w, name) for w in workers]).mean(0) for name in ("total", "left"))
        return replace(workers[0], total=total, left=left)

    def _step(self, rank: int, weigh: bool) -> Measured:
        layout, state = self.gradients.layout, self._states[rank]
        x = self.gradients.of(rank, self.steps)
        total = self._with_residual(state, x) if weigh else torch.empty(0)
        out, comm = torch.empty_like(x), Metered(self._comms[rank])
        step = Step(layout, self.steps, lr=0.1, squares=self.gradients.squares)
        comm.begin(layout.id)
        self.reducer.start(step, x, out, state, comm)()
        comm.end()
        states.commit(state)
        residual = self.reducer.residual(layout, state) if weigh else None
        left = x if residual is None else x + residual
        said = list(states.reports(state))
        timing = comm.timing
        return Measured(
            1e3 * timing.encode, 1e3 * timing.decode, comm.total.sent, said, total, left if weigh else torch.empty(0)
        )

    def _with_residual(self, state: State, x: Tensor) -> Tensor:
        adds = contribution(self.reducer, self.gradients.layout, state, x, WORKERS)
        residual = self.reducer.residual(self.gradients.layout, state)
        return adds.clone() if residual is None else adds + residual


def density_of(said: list[dict[str, Any]]) -> float | None:
    """Elements sent over elements, where a method reports that."""
    counts = [numbers for numbers in said if "sent" in numbers]
    return sum(n["sent"] for n in counts) / max(1, sum(n["of"] for n in counts)) if counts else None


def share(spec: Spec | None, density: float | None, nbytes: int, numel: int) -> float:
    """The ratio that ``torch.topk`` is asked for beside a spec: of the elements that it sends.

    The spec's own ratio, if it has one; else what it was seen to send; for methods that send all, their share of
    float32's bytes. In two digits, so that like is beside like.
    """
    own = None if spec is None else ratio_of(spec)
    if own is not None:
        return own
    seen = density if density is not None and density < 1 else nbytes / max(1, 4 * numel)
    return min(1.0, float(f"{seen:.2g}"))


def ratio_of(spec: Spec) -> float | None:
    """The spec's ``ratio``, if exactly one part of it has such a field.

    >>> ratio_of(parse("topk")), ratio_of(parse("bf16"))
    (0.01, None)
    """
    found = [part.ratio for part in spec.walk() if "ratio" in {f.name for f in fields(part)}]  # type: ignore[attr-defined, arg-type]
    return float(found[0]) if len(found) == 1 else None


def error_of(measured: Measured) -> float:
    """|what was not sent| over |gradient and residual|, of the means over workers."""
    norm = float(measured.total.norm())
    return float(measured.left.norm()) / norm if norm else 0.0


def topk_error(x: Tensor, ratio: float) -> float:
    """What ``torch.topk`` of so many elements leaves of a vector."""
    k = max(1, round(ratio * x.numel()))
    squares = x.square()
    norm = float(squares.sum())
    return max(0.0, 1.0 - float(torch.topk(squares, k, sorted=False).values.sum()) / norm) ** 0.5 if norm else 0.0


def _together(hub: Hub, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` on every worker, in rank order; the first error of any is raised here."""
    results: list[Any] = [None] * WORKERS
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with hub.turn():
                results[rank] = work(rank)
        except NetworkError:
            pass  # another one failed, and its error is the one to show
        except BaseException as error:
            errors.append(error)
            hub.abort(f"worker {rank} failed")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
