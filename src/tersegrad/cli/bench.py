"""What a spec costs on one core: time to encode and decode, bytes, error; beside a memory copy and ``torch.topk``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tersegrad.cli.timing import Times, environment, interleave
from tersegrad.comm.units import show_bytes
from tersegrad.core import Bucket, Compressor, Payload, Spec, State
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import compressor_of, decode
from tersegrad.specs.parse import parse
from tersegrad.wrappers import ErrorFeedback

SETTLE = 30  # encodings before the clock starts: adaptive methods find their place


@dataclass(frozen=True)
class Result:
    """One spec on one vector."""

    spec: str
    encode: Times  # with error feedback where the spec has it: add the residual, encode, take out what was sent
    accumulate: Times
    nbytes: int
    density: float
    error: float  # |decoded - x| / |x|


class _Contestant:
    """A spec with its state and buffers."""

    def __init__(self, spec: Spec, x: Tensor):
        self.compressor: Compressor = compressor_of(spec)
        self.feedback = any(isinstance(inner, ErrorFeedback) for inner in spec.walk())
        self.x = x
        self.residual, self.total = torch.zeros_like(x), torch.empty_like(x)
        self.state: State = self.compressor.init(Bucket.flat(x.numel()), 0)
        self.acc = self.compressor.accumulator(torch.empty_like(x), self.state)
        self.payload: Payload
        for _ in range(SETTLE):
            self.encode()
            states.settle(self.state, keep=True)

    def encode(self) -> None:
        if not self.feedback:
            self.payload = self.compressor.encode(self.x, self.state)
            return
        self.payload = self.compressor.encode_sum(self.residual, self.x, self.total, self.state)
        self.compressor.remove(self.payload, self.total, self.state)

    def accumulate(self) -> None:
        self.compressor.accumulate(self.payload, self.acc)


def run(specs: list[str], x: Tensor, rounds: int) -> tuple[list[Result], dict[str, Times]]:
    """All specs and the baselines, in turns within each round."""
    contestants = {text: _Contestant(parse(text), x) for text in specs}
    copy, k = torch.empty_like(x), max(1, x.numel() // 100)
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: copy.copy_(x),
        "add_": lambda: copy.add_(x),
        "torch.topk of 1 %": lambda: torch.topk(x.abs(), k),
    }
    for text, contestant in contestants.items():
        work[f"encode {text}"] = contestant.encode
        work[f"accumulate {text}"] = contestant.accumulate
    times = interleave(work, rounds)
    results = [
        _result(text, c, times[f"encode {text}"], times[f"accumulate {text}"]) for text, c in contestants.items()
    ]
    return results, {name: times[name] for name in ("copy", "add_", "torch.topk of 1 %")}


def _result(text: str, contestant: _Contestant, encode: Times, accumulate: Times) -> Result:
    decoded = decode(contestant.compressor, contestant.payload, contestant.state)
    norm = float(contestant.x.norm())
    error = float((decoded - contestant.x).norm()) / norm if norm else 0.0
    density = contestant.state.get("_sent", contestant.x.numel()) / max(1, contestant.x.numel())
    return Result(text, encode, accumulate, contestant.payload.nbytes, density, error)


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
    copy, topk = baselines["copy"].median, baselines["torch.topk of 1 %"].median
    lines = [f"{numel} floats, {torch.get_num_threads()} thread(s); ms, median [20 %, 80 %]"]
    lines += [f"  {name:<20} {times}" for name, times in baselines.items()]
    width = max(len(r.spec) for r in results)
    heads = ("encode", "/copy", "topk/", "accumulate", "bytes", "ratio", "density", "error")
    lines += ["", f"{'spec':<{width}} {heads[0]:>22} {heads[1]:>6} {heads[2]:>6} {heads[3]:>20} "
              f"{heads[4]:>9} {heads[5]:>8} {heads[6]:>8} {heads[7]:>7}"]  # fmt: skip
    for r in results:
        lines.append(
            f"{r.spec:<{width}} {r.encode!s:>22} {r.encode.median / copy:>6.2f} {topk / r.encode.median:>6.1f} "
            f"{r.accumulate!s:>20} {show_bytes(r.nbytes):>9} {4 * numel / r.nbytes:>7.1f}x "
            f"{r.density:>8.3%} {r.error:>7.4f}"
        )
    lines += [
        "",
        "/copy: encode time over a memory copy.  topk/: torch.topk's time over encode's.  encode includes the",
    ]
    lines += ["error feedback of specs that have it.  bytes: one payload, header included.  ratio: against float32."]
    return "\n".join(lines)
