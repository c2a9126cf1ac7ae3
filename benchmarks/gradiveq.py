"""GradiVeQ: what coding costs beside the bare matrix product, what a fit costs, and what a slow link saves.

    python benchmarks/gradiveq.py [--json FILE]
    torchrun --standalone --nproc-per-node 4 benchmarks/gradiveq.py --link [--json FILE]

Coding: 25 million floats in slices of 512, 64 coefficients each, one thread; then eleven layers of 512 x 512 x 3 x 3,
where slices by position and by channel have to be taken out of the gradient and put back. Fit: one layer of 256 x 256 x
3 x 3, 100 samples. Aggregation (``--link``): four processes over an emulated link of 100 Mbit/s, random bases with K/d
= 8 put in place, against a plain all-reduce, in turns; the time of one step on rank 0, and where it went. Four workers
share this machine's cores, so the CPU time of one worker alone, as on a machine of its own, is measured too.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import workers
from tersegrad.comm import threads
from tersegrad.comm.metered import Metered
from tersegrad.comm.throttled import Throttled
from tersegrad.compressors import QSGD, Identity
from tersegrad.core import Comm, Layout, Reducer, State, Step, reduce
from tersegrad.core import state as states
from tersegrad.lab.models import vgg16
from tersegrad.lab.timing import environment, interleave, write_rows
from tersegrad.reducers import Dense, GradiVeQ, Ring, TwoShot
from tersegrad.reducers.gradiveq.layer import Layer, Run
from tersegrad.reducers.gradiveq.subspace import Subspace

LINK = "100Mbit"
WORKERS = 4
RATIO = 8  # K / d
CHANNEL = GradiVeQ()
METHODS: dict[str, Reducer] = {
    repr(reducer): reducer
    for reducer in (
        Dense(),
        GradiVeQ(slice_size=4096, order="position"),
        GradiVeQ(order="position"),
        GradiVeQ(slice_size=512, order="position"),
        CHANNEL,
        replace(CHANNEL, slice_size=512),
        replace(CHANNEL, coefficients=TwoShot(QSGD(bits=8))),
        replace(CHANNEL, order="filter"),
        replace(CHANNEL, order="filter", coefficients=Ring(Identity())),
        replace(CHANNEL, order="filter", coefficients=TwoShot(QSGD(bits=8))),
    )
}


def orthonormal(length: int, d: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(length, d, generator=generator)).Q.contiguous()[None]


def coding_flat(numel: int) -> dict[str, Any]:
    """Slices that lie in order already."""
    slices = torch.randn(numel // 512, 512)
    space = Subspace.around(torch.randn_like(slices), orthonormal(512, 64))
    c, product, back = torch.empty(space.size), torch.empty(numel // 512, 64), torch.empty_like(slices)
    basis = space.basis[0]

    def decode() -> None:
        space.decode(c, back)
        back.add_(space.mean)

    return {
        "product X U": lambda: torch.mm(slices, basis, out=product),
        "encode slices": lambda: space.encode(slices, c),
        "product c U^T": lambda: torch.mm(product, basis.T, out=back),
        "decode slices": decode,
    }


def coding_layers(numel: int, order: str) -> dict[str, Any]:
    """Layers as DDP has them."""
    shape = (512, 512, 3, 3)
    split = GradiVeQ(slice_size=512, order=order).slicing(shape)
    layers = torch.randn(round(numel / (512 * 512 * 9)), 512 * 512 * 9)
    length, d = split.length, split.length // RATIO
    space = Subspace.around(torch.randn(split.count, length), orthonormal(length, d))
    coded = [Run(Layer(0, split, {}, "compress", layer, layer), 0, space) for layer in layers]
    c, rows, state = torch.empty(len(layers), space.size), layers.view(-1, length), {}
    product = torch.empty(len(rows), d)

    def encode() -> None:
        for run, coefficients in zip(coded, c, strict=True):
            run.encode(coefficients, state)

    def decode() -> None:
        for run, coefficients in zip(coded, c, strict=True):
            run.decode(coefficients, run.layer.out, state)

    return {
        "product X U": lambda: torch.mm(rows, space.basis[0], out=product),
        "encode layers": encode,
        "product c U^T": lambda: torch.mm(product, space.basis[0].T, out=rows),
        "decode layers": decode,
    }


def fit_seconds(order: str, rank: int | None) -> dict[str, Any]:
    """One layer learns from gradients of this rank plus a little noise, or from noise alone; what its report says."""
    reducer = GradiVeQ(warmup=0, worst=None, order=order)
    layout = Layout(("w",), ((256, 256, 3, 3),))
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(rank or 1, layout.numel, generator=generator)

    def work(comm: Comm) -> dict[str, Any]:
        memory = reducer.init(layout, comm)
        for _ in range(reducer.learn):
            x = torch.randn(layout.numel, generator=generator)
            if rank:
                x.mul_(0.05).add_(torch.randn(rank, generator=generator) @ directions)
            reduce(reducer, Step(layout), x, x, memory, comm)
            states.commit(memory)
        report: dict[str, Any] = memory["layers"]["layer w"]["report"]
        return report

    report = threads.run(1, work)[0]
    return {"order": order, "rank": rank, **report}


def resnet32() -> Layout:
    """ResNet-32 for CIFAR-100: 31 convolutions, their norms, one linear layer."""
    widths = [(3, 16)] + [(16, 16)] * 10 + [(16, 32)] + [(32, 32)] * 9 + [(32, 64)] + [(64, 64)] * 9
    shapes: list[tuple[int, ...]] = []
    for depth, width in widths:
        shapes += [(width, depth, 3, 3), (width,), (width,)]
    shapes += [(100, 64), (100,)]
    return Layout(tuple(f"p{i}" for i in range(len(shapes))), tuple(shapes))


def vgg() -> Layout:
    named = list(vgg16().named_parameters())
    return Layout(tuple(name for name, _ in named), tuple(tuple(p.shape) for _, p in named))


def compressed_state(reducer: GradiVeQ, layout: Layout, comm: Comm) -> State:
    """As after learning, with random bases of K / d = 8."""
    state = reducer.init(layout, comm)
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    for memory in state["layers"].values():
        split = reducer.slicing(shapes[memory["names"][0]])
        assert split is not None
        mean = torch.zeros(split.count, split.length)
        memory["fit"] = dict(vars(Subspace.around(mean, orthonormal(split.length, max(1, split.length // RATIO)))))
        memory["phase"] = "compress"
    return state


def aggregation(layout: Layout, rounds: int) -> list[dict[str, Any]]:
    """All methods take turns; the times of rank 0, and of a worker that is alone and has no link."""
    prepared = {name: _prepared(reducer, layout) for name, reducer in METHODS.items()}

    def work(comm: Comm) -> list[dict[str, Any]]:
        rows = []
        own = {name: {**METHODS[name].init(layout, comm), **states.copy(prepared[name])} for name in METHODS}
        gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(comm.rank))
        x = torch.empty_like(gradient)
        for turn in range(-1, rounds):
            for name, reducer in METHODS.items():
                metered = Metered(Throttled(LINK)(comm) if comm.size > 1 else comm)
                x.copy_(gradient)
                comm.all_reduce(torch.zeros(1))  # all start together
                started, busy = time.perf_counter(), time.thread_time()
                metered.begin(layout.id)
                reduce(reducer, Step(layout), x, x, own[name], metered)
                metered.end()
                ms, cpu_ms = 1e3 * (time.perf_counter() - started), 1e3 * (time.thread_time() - busy)
                states.commit(own[name])
                if turn >= 0:
                    split = {f"{k}_ms": 1e3 * v for k, v in vars(metered.timing).items()}
                    what = {"method": name, "workers": comm.size, "round": turn, "sent": metered.total.sent}
                    rows.append({**what, "ms": ms, "cpu_ms": cpu_ms, **split})
        return rows

    return workers.run(WORKERS, work) + workers.run(1, work)


def _prepared(reducer: Reducer, layout: Layout) -> State:
    if not isinstance(reducer, GradiVeQ):
        return {}
    return {"layers": threads.run(1, lambda comm: compressed_state(reducer, layout, comm))[0]["layers"]}


def show_coding(title: str, contestants: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    times = interleave(contestants, rounds)
    print(f"\n{title}; one thread, ms, median [20 %, 80 %]")
    for name, ms in times.items():
        product = "product X U" if name.startswith("encode") else "product c U^T"
        note = "" if name.startswith("product") else f"{ms.median / times[product].median:.2f}x {product}"
        print(f"  {name:<16} {ms!s:>26}   {note}")
    return [
        {"what": f"{title}: {name}", "round": i, "ms": t} for name, ms in times.items() for i, t in enumerate(ms.rounds)
    ]


def show_aggregation(title: str, rows: list[dict[str, Any]]) -> None:
    def median(method: str, workers: int, key: str) -> float:
        values = sorted(row[key] for row in rows if (row["method"], row["workers"]) == (method, workers))
        return float(values[len(values) // 2])

    print(f"\n{title}, {WORKERS} workers, {LINK}/s; medians of rank 0")
    dense = median("Dense()", WORKERS, "ms")
    for method in METHODS:
        split = ", ".join(f"{key} {median(method, WORKERS, key + '_ms'):.1f}" for key in ("encode", "wait", "decode"))
        ms = median(method, WORKERS, "ms")
        alone = median(method, 1, "cpu_ms")
        apart = alone + median(method, WORKERS, "wait_ms")
        print(f"  {method}: {ms:.1f} ms ({split}), {median(method, WORKERS, 'sent'):.0f} bytes, {dense / ms:.2f}x")
        print(f"    alone it works {alone:.1f} ms (CPU); with the wait above {apart:.1f} ms, {dense / apart:.2f}x")


def coding(numel: int, rounds: int) -> list[dict[str, Any]]:
    whole = numel // 512 * 512
    rows = show_coding(f"{whole} floats in slices", coding_flat(whole), rounds)
    for order in ("position", "channel", "filter"):
        title = f"11 layers of 512x512x3x3 by {order}"
        rows += show_coding(title, coding_layers(numel, order), rounds)
    print("\nfit of 256x256x3x3, 100 samples")
    for order in ("position", "channel"):
        for rank in (20, None):
            report = fit_seconds(order, rank)
            print(f"  {json.dumps(report)}")
            rows.append({"what": "fit", **report})
    return rows


def link(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for title, layout, times in (("ResNet-32", resnet32(), rounds), ("VGG-16", vgg(), min(rounds, 5))):
        measured = aggregation(layout, times)
        show_aggregation(f"{title}, {layout.numel} parameters", measured)
        rows += [{"what": f"aggregation {title}", "numel": layout.numel, **row} for row in measured]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", action="store_true", help="aggregation over a slow link, not coding and fits")
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = link(args.rounds) if args.link else coding(args.numel, args.rounds)
    if args.json:
        write_rows(args.json, [{**row, **environment()} for row in rows])


if __name__ == "__main__":
    workers.main(main)
