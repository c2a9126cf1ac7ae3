"""SIDCo-E with three stages and error feedback on one core, against the same algorithm in plain torch operations.

    python benchmarks/sidco.py [--json FILE]

The yardsticks of one run: residual.add_(g) plus one copy of the vector; the index codec's share of the encoding; and
decoding the payload into the vector again. All take turns in every round.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from tersegrad import SIDCo
from tersegrad.compressors import _indices as index_codec
from tersegrad.compressors.sidco import CAP, FEEDBACK
from tersegrad.compressors.sidco.sample import SAMPLE, SLICE
from tersegrad.core import Layout, accumulate, subtract
from tersegrad.core import state as states
from tersegrad.lab.timing import environment, interleave, write_rows

FIRST = 0.25  # share that the first stage keeps


class Plain:
    """The same algorithm as one would write it with torch alone; it ends with positions and values, not with bytes.

    A sample of a million, three stages on it, one pass over all for those above the threshold, the goal corrected by
    what the sample says was missed, and a cap.
    """

    def __init__(self, g: Tensor, ratio: float):
        self.g, self.ratio, self.residual = g, ratio, torch.zeros_like(g)
        self.every = max(1, g.numel() // SAMPLE)
        self.goal, self.calls = 1.0, 0
        self.found = self.step()[0].numel()

    def step(self) -> tuple[Tensor, Tensor]:
        x = self.g + self.residual
        target = self.ratio * x.numel()
        sample = self._sample(x).abs()
        scale = x.numel() / sample.numel()
        threshold = float(sample.mean()) * math.log(1 / FIRST)
        for left in (2, 1):
            tail = sample[sample > threshold]
            share = (target * self.goal / (scale * tail.numel())) ** (1 / left)
            threshold += (float(tail.mean()) - threshold) * -math.log(share)
        fitted = scale * int((sample > threshold).sum())
        self.goal *= math.exp(FEEDBACK * math.log(target / max(fitted, 0.1 * target)))
        self.calls += 1
        indices = (x.abs() > threshold).nonzero().squeeze(1)
        cap = math.ceil(CAP * target)
        if indices.numel() > cap:
            indices = indices[torch.topk(x[indices].abs(), cap, sorted=False).indices]
        values = x[indices]
        x[indices] = 0.0  # would be the next residual; the same vector is compressed again, so it is dropped
        return indices, values

    def _sample(self, x: Tensor) -> Tensor:
        """One of every so many slices, another one at each step."""
        if self.every < 2:
            return x
        groups = x.numel() // (self.every * SLICE)
        group = torch.arange(groups)
        chosen = group * self.every + ((group * 0x9E3779B1 + self.calls * 0x85EBCA6B) % 0xFFFFFFFB >> 7) % self.every
        return x[: groups * self.every * SLICE].view(-1, SLICE)[chosen].view(-1)


class Ours:
    """What ErrorFeedback(AllGather(SIDCo)) does before it sends."""

    def __init__(self, g: Tensor, ratio: float):
        self.g, self.residual, self.total = g, torch.zeros_like(g), torch.empty_like(g)
        self.compressor = SIDCo(ratio, stages=3)
        self.state = self.compressor.init(Layout.flat(g.numel()), 0)
        for _ in range(20):
            self.step()
            states.commit(self.state)
        self.chosen = self.compressor.select(g, self.state)
        self.buffer = torch.empty(index_codec.max_nbytes(self.chosen.numel(), g.numel()), dtype=torch.uint8)
        self.back = torch.empty_like(self.chosen)
        self.acc = torch.zeros_like(g)

    def step(self) -> None:
        torch.add(self.residual, self.g, out=self.total)
        self.payload = self.compressor.encode(self.total, self.state)
        subtract(self.compressor, self.payload, self.total, self.state)

    def code_indices(self) -> None:
        n = self.g.numel()
        form, used = index_codec.encode(self.chosen, n, self.buffer)
        index_codec.decode(form, self.buffer[:used], self.chosen.numel(), n, self.back)

    def accumulate(self) -> None:
        accumulate(self.compressor, self.payload, self.acc, 0.25)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    g = torch.distributions.Laplace(0.0, 1.0).sample((args.numel,))
    residual, copy = torch.zeros_like(g), torch.empty_like(g)
    rows = []
    for ratio in (0.01, 0.001):
        ours, plain = Ours(g, ratio), Plain(g, ratio)
        work = {
            "add_ + copy": lambda: (residual.add_(g), copy.copy_(g)),
            "sidco": ours.step,
            "plain torch": plain.step,
            "indices": ours.code_indices,
            "accumulate": ours.accumulate,
        }
        times = interleave(work, args.rounds)
        encode = times["sidco"].median
        print(f"\nratio {ratio}: {args.numel} floats, one thread; ms, median [20 %, 80 %]")
        notes = {
            "sidco": f"{encode / times['add_ + copy'].median:.2f}x add_ + copy",
            "plain torch": f"{times['plain torch'].median / encode:.1f}x sidco ({plain.found} found at first)",
            "indices": f"{times['indices'].median / encode:.1%} of sidco ({ours.chosen.numel()} coded and decoded)",
            "accumulate": f"{times['accumulate'].median / encode:.1%} of sidco",
        }
        for name, ms in times.items():
            print(f"  {name:<12} {ms!s:>26}   {notes.get(name, '')}")
            rows += [
                {"what": name, "ratio": ratio, "round": i, "ms": t, **environment()} for i, t in enumerate(ms.rounds)
            ]
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
