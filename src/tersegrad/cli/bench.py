"""What a spec costs on one core: time to encode and decode, bytes, error; beside a memory copy and ``torch.topk``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
    settled,
    subtract,
)
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import compressor_of, decode
from tersegrad.lab.timing import Times, environment, interleave
from tersegrad.specs import parse

WARMUP = 30  # steps before the clock starts: adaptive methods find their place, and a residual builds up
RATIO = 0.01  # of torch.topk, beside specs that have no ratio of their own


@dataclass(frozen=True)
class Result:
    """One spec on one vector."""

    spec: str
    ratio: float | None  # the spec's own, if it has one
    encode: Times  # with error feedback where the spec has it: add the residual, encode, take out what was sent
    accumulate: Times
    nbytes: int
    density: float
    error: float  # |decoded - v| / |v|, v being what was encoded

    @property
    def topk(self) -> str:
        """The baseline that it is compared with."""
        return topk_name(RATIO if self.ratio is None else self.ratio)


def topk_name(ratio: float) -> str:
    """Of a baseline.

    >>> topk_name(0.01), topk_name(0.0005)
    ('torch.topk of 1 %', 'torch.topk of 0.05 %')
    """
    return f"torch.topk of {100 * ratio:.4g} %"


def ratio_of(spec: Spec) -> float | None:
    """The spec's ``ratio``, if exactly one part of it has such a field.

    >>> ratio_of(parse("topk")), ratio_of(parse("bf16"))
    (0.01, None)
    """
    found = [part.ratio for part in spec.walk() if "ratio" in {f.name for f in fields(part)}]  # type: ignore[attr-defined, arg-type]
    return float(found[0]) if len(found) == 1 else None


class _Contestant:
    """A spec past its beginning, with its state, its residual and its buffers."""

    def __init__(self, text: str, x: Tensor):
        parsed = parse(text)
        self.spec = settled(parsed) if isinstance(parsed, Reducer) else parsed
        self.compressor: Compressor = compressor_of(self.spec)
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

    def density(self) -> float:
        """Elements sent over elements; 1 for methods that send all."""
        said = [numbers for numbers in states.reports(self.state) if "sent" in numbers]
        return sum(n["sent"] for n in said) / max(1, sum(n["of"] for n in said)) if said else 1.0

    def error(self) -> float:
        encoded = self.x + self.residual
        norm = float(encoded.norm())
        decoded = decode(self.compressor, self.payload, self.state)
        return float(decoded.sub_(encoded).norm()) / norm if norm else 0.0


def _batches(x: Tensor) -> Iterator[Tensor]:
    """The gradient as other batches might give it: the same magnitudes with other signs."""
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (x.numel() + 97 * WARMUP,), dtype=torch.int8, generator=generator).mul_(2).sub_(1)
    gradient = torch.empty_like(x)
    for step in range(WARMUP):
        yield torch.mul(x, signs[97 * step : 97 * step + x.numel()], out=gradient)


def run(specs: list[str], x: Tensor, rounds: int) -> tuple[list[Result], dict[str, Times]]:
    """All specs and the baselines, in turns within each round.

    Args:
        specs: As text; each is measured as it is once warm-ups and schedules by steps have ended.
        x: The gradient.
        rounds: Of which the median counts.

    Returns:
        One result a spec, and the times of the baselines: a copy, an addition, ``torch.topk`` at each ratio.
    """
    contestants = {text: _Contestant(text, x) for text in specs}
    baselines = _baselines(x, [ratio_of(c.spec) or RATIO for c in contestants.values()])
    work = dict(baselines)
    for text, contestant in contestants.items():
        work[f"encode {text}"] = contestant.encode
        work[f"accumulate {text}"] = contestant.accumulate
    times = interleave(work, rounds)
    results = [
        _result(text, c, times[f"encode {text}"], times[f"accumulate {text}"]) for text, c in contestants.items()
    ]
    return results, {name: times[name] for name in baselines}


def _baselines(x: Tensor, ratios: list[float]) -> dict[str, Callable[[], object]]:
    copy = torch.empty_like(x)
    work: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(x), "add_": lambda: copy.add_(x)}
    for ratio in sorted(set(ratios)):
        work[topk_name(ratio)] = partial(_topk, x, max(1, round(ratio * x.numel())))
    return work


def _topk(x: Tensor, k: int) -> object:
    return torch.topk(x.abs(), k)


def _result(text: str, contestant: _Contestant, encode: Times, accumulate: Times) -> Result:
    ratio, nbytes = ratio_of(contestant.spec), contestant.payload.nbytes
    return Result(text, ratio, encode, accumulate, nbytes, contestant.density(), contestant.error())


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


def show(results: list[Result], baselines: dict[str, Times], numel: int) -> str:
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
            f"{faster:>{len(topk)}} {r.accumulate!s:>20} {show_bytes(r.nbytes):>9} {4 * numel / r.nbytes:>7.1f}x "
            f"{r.density:>8.3%} {r.error:>7.4f}"
        )
    return "\n".join([*lines, "", LEGEND])


LEGEND = f"""\
/copy: encode time over a memory copy.  topk/: torch.topk's time over encode's, at the spec's own ratio, or at
{100 * RATIO:g} % where it has none.  encode includes the error feedback of specs that have it, with the residual of
{WARMUP} steps.  bytes: one payload, header included.  ratio: against float32."""


def _topk_heading(results: list[Result]) -> str:
    """Says at which ratio, or that every spec has its own."""
    names = {r.topk.removeprefix("torch.topk of ") for r in results}
    return f"topk/ at {names.pop()}" if len(names) == 1 else "topk/ at own ratio"
