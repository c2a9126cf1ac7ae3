"""The step of VGC on one core: accumulate, test, decay, select; against the two additions that it cannot do without.

    python benchmarks/vgc.py [--json FILE]

Gradients are noise: N(0, 1), with squares of 1, drawn anew at each step until the clock starts. "vgc" is what happens
before anything is packed: r + g, v + q, the test, the decay, the positions. "all before sending" packs them too and
takes out what is sent. All take turns in every round.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from tersegrad.comm import threads
from tersegrad.core import Layout, Step, back_buffer, reduce, subtract
from tersegrad.core import state as states
from tersegrad.lab.timing import environment, interleave, write_rows
from tersegrad.reducers import VGC
from tersegrad.wrappers import ErrorFeedback

VECTORS = 1
WARMUP = 60  # steps before the clock starts, so that some elements have waited long


class Ours:
    """What ErrorFeedback(VGC(alpha)) does, step after step."""

    def __init__(self, gradients: list[torch.Tensor], alpha: float):
        self.gradients, self.numel = gradients, gradients[0].numel()
        self.generator = torch.Generator().manual_seed(7)
        self.reducer = ErrorFeedback(VGC(alpha=alpha))
        self.now = Step(Layout.flat(self.numel), squares=torch.ones(self.numel))
        self.offsets = torch.tensor(self.now.layout.offsets)
        self.comm = threads.run(1, lambda comm: comm)[0]
        self.state = self.reducer.init(self.now.layout, self.comm)
        self.out = torch.empty(self.numel)
        for _ in range(WARMUP):
            self.whole()

    def gradient(self) -> torch.Tensor:
        return torch.randn(self.numel, generator=self.generator)

    def whole(self) -> None:
        self.out.copy_(self.gradient())
        reduce(self.reducer, self.now, self.out, self.out, self.state, self.comm)
        states.commit(self.state)
        self.now = replace(self.now, number=self.now.number + 1)

    def select(self) -> None:
        vgc, memory = self.reducer.inner, self.state["inner"]
        memory["_back_variance"] = variance = back_buffer(memory, "variance")
        self.state["_back_residual"] = total = back_buffer(self.state, "residual")
        torch.add(self.state["residual"], self.gradients[0], out=total)
        self.sent = vgc._select(self.now, total, self.offsets, variance, memory).sent

    def encode(self) -> None:
        self.select()
        codec, memory = self.reducer.inner._exchange.compressor, self.state["inner"]["exchange"]
        memory |= {"_positions": self.sent, "_offsets": self.offsets}
        self.payload = codec.encode(self.state["_back_residual"], memory)
        subtract(codec, self.payload, self.state["_back_residual"], memory)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gradients = [torch.randn(args.numel, generator=torch.Generator().manual_seed(i)) for i in range(VECTORS)]
    r, v, q = torch.zeros(args.numel), torch.zeros(args.numel), torch.ones(args.numel)
    rows = []
    for alpha in (1.5,):
        ours = Ours(gradients, alpha)
        times = interleave(
            {
                "r.add_(g) + v.add_(q)": lambda: (r.add_(gradients[0]), v.add_(q)),
                "vgc": ours.select,
                "all before sending": ours.encode,
            },
            args.rounds,
        )
        base = times["r.add_(g) + v.add_(q)"].median
        sent, nbytes = ours.sent.numel(), ours.payload.nbytes
        print(f"\nalpha {alpha}: {args.numel} floats, one thread; ms, median [20 %, 80 %]; {sent} sent, {nbytes} bytes")
        for name, ms in times.items():
            print(f"  {name:<24} {ms!s:>26}   {ms.median / base:.2f}x")
            rows += [
                {"what": name, "alpha": alpha, "sent": sent, "round": i, "ms": t, **environment()}
                for i, t in enumerate(ms.rounds)
            ]
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
