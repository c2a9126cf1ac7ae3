"""GradiVeQ on real gradients: what it sends and what it loses, over ways of splitting layers and shares of energy.

    python benchmarks/gradients.py cifar-resnet20 --data DIR --steps $(seq 100 259) --out FILE.npz
    python benchmarks/gradiveq_quality.py FILE.npz

Takes consecutive gradients of one worker. Each method learns from the first 100 (it holds the last 20 of them out for
judging) and then sends the others; the loss is the share of the convolutions' energy that does not arrive.
"""

import argparse
import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tersegrad.comm import threads
from tersegrad.core import Comm, Layout, Step, reduce
from tersegrad.core import state as states
from tersegrad.lab.timing import environment, write_rows
from tersegrad.reducers import GradiVeQ

METHODS = [
    GradiVeQ(slice_size=4096, loss=0.01, rule="paper"),  # first slice, not judged
    *(GradiVeQ(slice_size=size, order="position", loss=loss) for size in (4096, 1024, 512) for loss in (0.01, 0.1)),
    *(
        GradiVeQ(slice_size=size, loss=loss, order=order)
        for order in ("channel", "filter")
        for size in (1024, 512)
        for loss in (0.01, 0.03, 0.1, 0.3)
    ),
]


def judge(reducer: GradiVeQ, layout: Layout, gradients: torch.Tensor) -> dict[str, float]:
    """Elements sent for the convolutions, as a ratio, and their energy lost, over the steps after learning."""
    reducer = replace(reducer, warmup=0, drift=None, compress=len(gradients), tiny=0)
    convolution = torch.cat([torch.full((n,), len(s) == 4) for n, s in zip(layout.sizes, layout.shapes, strict=True)])

    def work(comm: Comm) -> dict[str, float]:
        memory = reducer.init(layout, comm)
        lost = energy = 0.0
        for step, g in enumerate(gradients):
            x = g.clone()
            reduce(reducer, Step(layout), x, x, memory, comm)
            states.commit(memory)
            if all(m["phase"] != "learn" for m in memory["layers"].values()) and step >= reducer.learn:
                lost += float((x - g)[convolution].double().square().sum())
                energy += float(g[convolution].double().square().sum())
        layers = memory["layers"].values()
        fits = [m["fit"] for m in layers if m["fit"]]
        coded = [part for fit in fits for part in ([fit] if "basis" in fit else fit.values())]
        dense = int(convolution.sum()) - sum(fit["mean"].numel() for fit in coded)
        return {
            "ratio": int(convolution.sum()) / (dense + sum(fit["offset"].numel() for fit in coded)),
            "lost": lost / energy,
            "refused": len(layers) - len(fits),
            "layers": len(layers),
            "basis_floats": sum(fit["basis"].numel() for fit in coded) / layout.numel,
            "fit_seconds": sum(m["report"]["fit_seconds"] for m in layers),
        }

    return threads.run(1, work)[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gradients", type=Path)
    parser.add_argument("--orders", nargs="+", help="only these")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = np.load(args.gradients)
    steps = sorted((key for key in data.files if key.startswith("step")), key=lambda key: int(key[4:]))
    shapes = tuple(tuple(ast.literal_eval(str(shape))) for shape in data["param_shapes"])
    layout = Layout(tuple(map(str, data["param_names"])), shapes)
    gradients = torch.from_numpy(np.stack([data[step] for step in steps]))
    methods = [method for method in METHODS if not args.orders or method.order in args.orders]
    print(f"{len(gradients)} gradients of {layout.numel} elements")
    rows = []
    for reducer in methods:
        found = judge(reducer, layout, gradients)
        rows.append({"spec": repr(reducer), "gradients": args.gradients.name, **found, **environment()})
        print(
            f"  {reducer!r:<66} {found['ratio']:5.1f}x fewer, loses {found['lost']:.3f}, refused {found['refused']} of "
            f"{found['layers']}, bases {found['basis_floats']:.1f}x the model, fits {found['fit_seconds']:.1f} s",
            flush=True,
        )
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
