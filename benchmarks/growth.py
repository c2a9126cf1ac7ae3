"""How cost grows: with the length of the gradient, and with the number of workers.

python benchmarks/growth.py [--most 268435456] [--workers 2,4,8] [--rounds 5] [--picture FILE] [--json FILE]

Lengths go from 2^18 (0.26 M floats) in steps of four. For every method: encode, accumulate one payload, bytes of a
payload, one thread. Then, at 2^22 floats, with more and more workers (threads of this process, so their times add up
here and say nothing): bytes that leave one worker in a step, counted up to --workers, and by the planner's cost model
up to 1,024. All methods take turns in every round. A copy of the gradient is the yardstick.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tersegrad import Metered
from tersegrad.comm import threads
from tersegrad.comm.units import show_bytes
from tersegrad.core import Comm, Compressor, Layout, Payload, State, Step, Transformed, accumulate, reduce
from tersegrad.core import state as states
from tersegrad.lab import plots
from tersegrad.lab.timing import environment, interleave, write_rows
from tersegrad.plan import codecs
from tersegrad.plan.cost import Link
from tersegrad.specs import parse, parse_reducer

COMPRESSORS = ("BF16()", "QSGD(bits=4)", "TopK(0.01)", "SIDCo(0.01)", "FFT()")
REDUCERS = (
    "Dense()",
    "AllReduce(BF16())",
    "AllGather(TopK(0.01))",
    "TwoShot(TopK(0.01))",
    "PowerSGD(rank=2)",
)
LEAST = 1 << 18
EXCHANGED = 1 << 22  # floats, for the tables by workers
SCALE = tuple(2**i for i in range(1, 11))  # workers
COPY = "a copy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1 << 28)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [LEAST << shift for shift in range(0, 30, 2) if LEAST << shift <= args.most]
    by_length = [row for numel in lengths for row in coding(numel, args.rounds)]
    by_workers = [row for n in map(int, args.workers.split(",")) for row in exchanging(n)]
    models = {text: predicted(text) for text in REDUCERS}
    print(f"\nby the cost model, {EXCHANGED:,} floats: bytes that leave one worker")
    for text, sent in models.items():
        print(f"  {text:<24} " + ", ".join(f"{n}: {show_bytes(sent[n])}" for n in SCALE))
    if args.picture is not None:
        print("drawn:", draw(by_length, by_workers, models, args.picture))
    if args.json is not None:
        write_rows(args.json, [{**row, **environment()} for row in (*by_length, *by_workers)])


def gradient(numel: int, seed: int = 0) -> Tensor:
    """Heavy tails, as gradients have."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=noise)
    return x.mul_(x.abs())


def coding(numel: int, rounds: int) -> list[dict[str, Any]]:
    """Encode and accumulate, of every compressor, at one length."""
    x = gradient(numel)
    target = torch.empty_like(x)
    work: dict[str, Callable[[], object]] = {COPY: partial(target.copy_, x)}
    payloads = {}
    for text in COMPRESSORS:
        compressor = parse(text)
        state = compressor.init(Layout.flat(numel), 0)
        encode = partial(_encode, compressor, x, state)
        for _ in range(3):  # SIDCo finds its number of stages
            made = encode()
            payloads[text] = Payload(made.body.clone(), numel, made.meta)  # the next one is written over it
        acc = torch.zeros(compressor.domain(numel)) if isinstance(compressor, Transformed) else target
        work[f"encode {text}"] = encode
        work[f"accumulate {text}"] = partial(accumulate, compressor, payloads[text], acc)
    times = interleave(work, rounds)
    print(f"\n{numel:,} floats: a copy takes {times[COPY]} ms")
    rows = []
    for text in COMPRESSORS:
        encode_ms, accumulate_ms = times[f"encode {text}"], times[f"accumulate {text}"]
        nbytes = payloads[text].body.numel()
        print(f"  {text:<14} encode {encode_ms!s:>26} ms, accumulate {accumulate_ms!s:>26} ms, {show_bytes(nbytes)}")
        about = {"spec": text, "numel": numel, "nbytes": nbytes, "copy_ms": times[COPY].median}
        rows.append(about | {"encode_ms": encode_ms.median, "accumulate_ms": accumulate_ms.median})
    return rows


def _encode(compressor: Compressor, x: Tensor, state: State) -> Payload:
    payload = compressor.encode(x, state)
    states.commit(state)
    return payload


def predicted(text: str) -> dict[int, int]:
    """Bytes that leave one worker by the cost model, by number of workers."""
    cost = codecs.measure(parse_reducer(text), _matrix(), gradient(EXCHANGED))
    return {n: codecs.split(cost, n, codecs.Network.of(Link())).sent for n in SCALE}


def _matrix() -> Layout:
    return Layout(("weight",), ((2048, EXCHANGED // 2048),))


def exchanging(size: int) -> list[dict[str, Any]]:
    """Bytes that leave one worker in a step, of every reducer."""

    def work(comm: Comm) -> list[int]:
        x, sent = gradient(EXCHANGED, comm.rank), []
        for text in REDUCERS:
            layout, reducer, meter = _matrix(), parse_reducer(text), Metered(comm)
            state = reducer.init(layout, comm)
            for number in range(2):
                reduce(reducer, Step(layout, number), x.clone(), torch.empty_like(x), state, meter)
                states.commit(state)
            sent.append(meter.total.sent // 2)
        return sent

    rows = []
    print(f"\n{size} workers, {EXCHANGED:,} floats: bytes that leave one of them in a step")
    for text, sent in zip(REDUCERS, threads.run(size, work)[0], strict=True):
        print(f"  {text:<24} {show_bytes(sent)}")
        rows.append({"spec": text, "workers": size, "numel": EXCHANGED, "sent": sent})
    return rows


def draw(
    by_length: list[dict[str, Any]], by_workers: list[dict[str, Any]], models: dict[str, dict[int, int]], path: Path
) -> Path:
    """Milliseconds and bytes against length; bytes against workers, squares where they were counted."""
    with plots.style():
        figure = plots.new_figure(6.4, 9.0)
        (encode, accumulate), (payload, sent) = figure.subplots(2, 2)
        handles, names = [], []
        for place, text in enumerate(COMPRESSORS):
            rows = [row for row in by_length if row["spec"] == text]
            millions = [row["numel"] / 1e6 for row in rows]
            for axes, key in ((encode, "encode_ms"), (accumulate, "accumulate_ms")):
                values = [row[key] for row in rows]
                (line,) = axes.plot(millions, values, color=plots.SERIES[place], marker="o", markersize=3)
            payload.plot(
                millions, [row["nbytes"] / 1e6 for row in rows], color=plots.SERIES[place], marker="o", markersize=3
            )
            handles.append(line)
            names.append(text)
        copies = {row["numel"] / 1e6: row["copy_ms"] for row in by_length}
        for axes, what in ((encode, "encode"), (accumulate, "accumulate one payload")):
            (line,) = axes.plot(list(copies), list(copies.values()), color=plots.PLAIN, linestyle="--")
            axes.set_ylabel(f"ms to {what} (log)")
        payload.set_ylabel("MB of a payload (log)")
        for axes in (encode, accumulate, payload):
            axes.set_xlabel("million floats (log)")
            plots.log_scale(axes.xaxis, lambda v: f"{v:g}")
            plots.log_scale(axes.yaxis, lambda v: f"{v:g}")
        handles.append(line)
        names.append(COPY)
        for place, text in enumerate(REDUCERS, start=len(COMPRESSORS)):
            rows = [row for row in by_workers if row["spec"] == text]
            colour = plots.SERIES[place % len(plots.SERIES)]
            counted = [row["workers"] for row in rows], [row["sent"] / 1e6 for row in rows]
            sent.plot(*counted, color=colour, marker="s", markersize=4, linestyle="")
            (line,) = sent.plot(list(models[text]), [b / 1e6 for b in models[text].values()], color=colour)
            handles.append(line)
            names.append(text)
        sent.set_xlabel(f"workers (log; {EXCHANGED / 1e6:.1f} M floats)")
        sent.set_ylabel("MB that leave a worker (log)")
        plots.log_scale(sent.xaxis, lambda v: f"{v:g}")
        sent.set_xticks(SCALE[::3])
        plots.log_scale(sent.yaxis, lambda v: f"{v:g}")
        plots.legend(figure, handles, names)
    return plots.save(figure, path)


if __name__ == "__main__":
    main()
