"""What a spec costs on one core: time to encode and decode, bytes, error; beside a memory copy and ``torch.topk``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tersegrad.cli import whole
from tersegrad.comm.units import show_bytes
from tersegrad.core import (
    Compressor,
    Layout,
    Payload,
    Reducer,
    Spec,
    State,
    Sum,
    Transformed,
    Vector,
    accumulate,
    adds_in_place,
    decode_sum,
    encode,
    remembers,
    subtract,
)
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import decode
from tersegrad.lab.timing import Times, environment, interleave
from tersegrad.plan import made_up
from tersegrad.plan.made_up import Gradients

WARMUP = whole.STEPS


@dataclass(frozen=True)
class Result:
    """One spec on one vector."""

    spec: str
    ratio: float  # of the elements that it sends: what torch.topk is asked for beside it
    encode: Times  # with error feedback where the spec has it: add the residual, encode, take out what was sent
    accumulate: Times
    nbytes: int
    density: float
    error: float  # |decoded - v| / |v|, v being what was encoded

    @property
    def topk(self) -> str:
        """The baseline that it is compared with."""
        return topk_name(self.ratio)


def topk_name(ratio: float) -> str:
    """Of a baseline.

    >>> topk_name(0.01), topk_name(0.0005)
    ('torch.topk of 1 %', 'torch.topk of 0.05 %')
    """
    return f"torch.topk of {100 * ratio:.4g} %"


class _Contestant:
    """A codec past its beginning, with its state, its residual and its buffers."""

    def __init__(self, spec: Spec, compressor: Compressor, x: Tensor):
        self.spec, self.compressor = spec, compressor
        self.state: State = self.compressor.init(Layout.flat(x.numel()), 0)
        self.x, self.residual, self.rest = x, torch.zeros_like(x), torch.empty_like(x)
        self.remembers = remembers(self.spec)
        self.payload: Payload
        for gradient in _batches(x):
            self._encode(gradient)
            states.commit(self.state)
            if self.remembers:
                self.residual, self.rest = self.rest, self.residual
        self.encode()
        self.accumulate = self._accumulation()
        self.ratio = whole.share(spec, self.density(), self.payload.nbytes, x.numel())

    def work(self) -> dict[str, Callable[[], object]]:
        """What is timed, a part at a time."""
        return {"encode": self.encode, "accumulate": self.accumulate}

    def result(self, label: str, times: dict[str, Times]) -> Result:
        """What was measured, and what one payload has."""
        nbytes, density = self.payload.nbytes, self.density()
        shown = 1.0 if density is None else density
        return Result(label, self.ratio, times["encode"], times["accumulate"], nbytes, shown, self.error())

    def encode(self) -> None:
        self._encode(self.x)

    def _encode(self, gradient: Tensor) -> None:
        x: Vector = Sum(self.residual, gradient, self.rest) if self.remembers else gradient
        self.payload = encode(self.compressor, x, self.state)
        if self.remembers:
            subtract(self.compressor, self.payload, self.rest, self.state)

    def _accumulation(self) -> Callable[[], object]:
        """Adds the last payload to a sum of others."""
        numel = self.x.numel()
        if isinstance(self.compressor, Transformed):
            acc = torch.zeros(self.compressor.domain(numel))
        else:
            acc = torch.zeros(numel)
            if not adds_in_place(self.compressor):
                return lambda: decode_sum(self.compressor, [self.payload], 1.0, acc, self.state)
        return lambda: accumulate(self.compressor, self.payload, acc)

    def density(self) -> float | None:
        """Elements sent over elements; None for methods that send all."""
        return whole.density_of(list(states.reports(self.state)))

    def error(self) -> float:
        encoded = self.x + self.residual
        norm = float(encoded.norm())
        decoded = decode(self.compressor, self.payload, self.state)
        return float(decoded.sub_(encoded).norm()) / norm if norm else 0.0


class _Method:
    """A whole method past its beginning, run by workers that take turns."""

    def __init__(self, reducer: Reducer, gradients: Gradients):
        self.method = whole.Whole(reducer, gradients)
        self.seen: list[whole.Measured] = []
        self.last = self.method.step()
        self.density = whole.density_of(self.last.said)
        self.ratio = whole.share(reducer, self.density, self.last.nbytes, gradients.layout.numel)

    def work(self) -> dict[str, Callable[[], object]]:
        """One step of all workers, which time themselves."""
        return {"step": lambda: self.seen.append(self.method.step(weigh=False))}

    def result(self, label: str, times: dict[str, Times]) -> Result:
        """What the first worker measured."""
        seen = self.seen[-len(times["step"].rounds) :]
        return Result(
            label,
            self.ratio,
            Times(tuple(one.encode for one in seen)),
            Times(tuple(one.decode for one in seen)),
            self.last.nbytes,
            1.0 if self.density is None else self.density,
            whole.error_of(self.last),
        )


def _contestant(spec: Spec, x: Tensor, gradients: Gradients) -> _Contestant | _Method:
    codec = whole.codec_of(spec)
    if codec is not None:
        return _Contestant(spec, codec, x)
    assert isinstance(spec, Reducer)
    return _Method(spec, gradients)


def _batches(x: Tensor) -> Iterator[Tensor]:
    """The gradient as other batches might give it: the same magnitudes with other signs."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (x.numel() + 97 * WARMUP,), dtype=torch.int8, generator=generator).mul_(2).sub_(1)
    gradient = torch.empty_like(x)
    for step in range(WARMUP):
        yield torch.mul(x, signs[97 * step : 97 * step + x.numel()], out=gradient)


def run(
    specs: list[str], x: Tensor, rounds: int, gradients: Gradients | None = None
) -> tuple[list[Result], dict[str, Times]]:
    """All specs and the baselines, in turns within each round.

    Args:
        specs: As text; each is measured as it is once warm-ups and schedules by steps have ended, and Auto's candidates
            instead of Auto.
        x: The gradient that codecs are given.
        rounds: Of which the median counts.
        gradients: Those that whole methods are given; made of ``x`` if there are none.

    Returns:
        One result a spec, and the times of the baselines: a copy, an addition, ``torch.topk`` at each ratio.
    """
    made = {label: spec for text in specs for label, spec in whole.expand(text).items()}
    gradients = gradients or Gradients(x, made_up.layout_of(x.numel()))
    contestants = {label: _contestant(spec, x, gradients) for label, spec in made.items()}
    baselines = _baselines(x, [c.ratio for c in contestants.values()])
    work = dict(baselines)
    for label, contestant in contestants.items():
        work |= {f"{part} {label}": call for part, call in contestant.work().items()}
    times = interleave(work, rounds)
    results = []
    for label, contestant in contestants.items():
        own = {part: times[f"{part} {label}"] for part in contestant.work()}
        results.append(contestant.result(label, own))
    return results, {name: times[name] for name in baselines}


def _baselines(x: Tensor, ratios: list[float]) -> dict[str, Callable[[], object]]:
    copy = torch.empty_like(x)
    work: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(x), "add_": lambda: copy.add_(x)}
    for ratio in sorted(set(ratios)):
        work[topk_name(ratio)] = partial(_topk, x, max(1, round(ratio * x.numel())))
    return work


def _topk(x: Tensor, k: int) -> object:
    return torch.topk(x.abs(), k)


def rows(results: list[Result], baselines: dict[str, Times], numel: int) -> list[dict[str, Any]]:
    """One row a measurement, for a file."""
    common = {"numel": numel, **environment()}
    table = [
        {"what": name, "ms": ms, "round": i, **common} for name, t in baselines.items() for i, ms in enumerate(t.rounds)
    ]
    for r in results:
        about = {"spec": r.spec, "nbytes": r.nbytes, "density": r.density, "error": r.error, **common}
        for what, times in (("encode", r.encode), ("accumulate", r.accumulate)):
            table += [{"what": what, "ms": ms, "round": i, **about} for i, ms in enumerate(times.rounds)]
    return table


def show(
    results: list[Result], baselines: dict[str, Times], numel: int, gradients: object = "made-up gradients"
) -> str:
    """The table for people; times in ms, median [20th, 80th percentile]."""
    lines = [f"{numel} floats, {torch.get_num_threads()} thread(s); ms, median [20 %, 80 %]"]
    lines += [f"  {name:<22} {times}" for name, times in baselines.items()]
    width = max(len("spec"), *(len(r.spec) for r in results))
    topk = _topk_heading(results)
    lines += ["", f"{'spec':<{width}} {'encode':>22} {'/copy':>6} {topk} {'accumulate':>20} "
              f"{'bytes':>9} {'ratio':>8} {'density':>8} {'error':>7}"]  # fmt: skip
    for r in results:
        faster = f"{baselines[r.topk].median / r.encode.median:.1f}"
        if len({r.topk for r in results}) > 1:
            faster += f" ({r.topk.removeprefix('torch.topk of ')})"
        lines.append(
            f"{r.spec:<{width}} {r.encode!s:>22} {r.encode.median / baselines['copy'].median:>6.2f} "
            f"{faster:>{len(topk)}} {r.accumulate!s:>20} {show_bytes(r.nbytes):>9} "
            f"{4 * numel / max(1, r.nbytes):>7.1f}x {r.density:>8.3%} {r.error:>7.4f}"
        )
    return "\n".join([*lines, "", LEGEND.format(gradients=gradients)])


LEGEND = f"""\
/copy: encode time over a memory copy.  topk/: torch.topk's time over encode's, at the share of elements that the spec
sends; at its share of float32's bytes where it sends all.  encode includes the error feedback of specs that have it,
with the residual of {WARMUP} steps.  bytes: one payload, header included.  ratio: against float32.
Whole methods, more than a codec (vgc, powersgd, gradiveq, dgc, ...), are run by {whole.WORKERS} workers in turns,
on {{gradients}}.
Their encode is what a worker does before its first message, and accumulate all that it does after it."""


def _topk_heading(results: list[Result]) -> str:
    """Says at which ratio, or that every spec has its own."""
    names = {r.topk.removeprefix("torch.topk of ") for r in results}
    return f"topk/ at {names.pop()}" if len(names) == 1 else "topk/ at own ratio"
