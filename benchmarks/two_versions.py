"""One step of each method in two versions of the library, in turns: what a change of the library costs or gains.

    python benchmarks/two_versions.py OTHER_CHECKOUT [--rounds 15] [--numel 8M] [--json FILE]

Each version runs in a process of its own, and both wait for their turn; a round is one step of every method in both.
One worker on one core, no network: adding the residual, encoding, sealing the frame, taking out what was sent,
decoding; `decode 4` is the sum of four workers' payloads. Version 0.1 has another API, so the steps are written twice.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SPECS = {
    "topk": "ErrorFeedback(AllGather(TopK(ratio=0.01)))",
    "topk 4 bits": "ErrorFeedback(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))))",
    "sidco": "ErrorFeedback(AllGather(SIDCo(ratio=0.01)))",
    "fft": "AllGather(PerTensor(FFT(theta=0.85)))",
    "vgc": "ErrorFeedback(VGC(alpha=1.5))",
    "powersgd": "ErrorFeedback(PowerSGD(rank=2))",
    "bf16": "AllReduce(BF16())",
    "int8": "ErrorFeedback(TwoShot(Blockwise()))",
    "per tensor": "ErrorFeedback(AllGather(PerTensor(TopK(ratio=0.01))))",
    "policy": "ByName({}, default=ErrorFeedback(AllGather(TopK(ratio=0.01))))",
    "low memory": "LowMemory(AllGather(TopK(ratio=0.01)))",
    "dgc": "MomentumCorrection(AllGather(TopK(ratio=0.01)))",
    "gaussiank": "ErrorFeedback(AllGather(GaussianK(ratio=0.01)))",
    "redsync": "ErrorFeedback(AllGather(RedSync(ratio=0.01)))",
    "sampled": "ErrorFeedback(AllGather(SampledTopK(ratio=0.01)))",
    "randomk": "ErrorFeedback(AllReduce(RandomK(ratio=0.01)))",
    "qsgd": "AllGather(QSGD(bits=4))",
    "natural": "AllGather(Natural())",
    "onebit": "ErrorFeedback(AllGather(OneBit()))",
    "efsignsgd": "ErrorFeedback(AllGather(PerTensor(ScaledSign())))",
    "terngrad": "AllGather(PerTensor(TernGrad()))",
    "signsgd": "SignSGD()",
}


def serve(numel: int) -> None:
    """Reads names of methods, runs a step of each and prints its milliseconds."""
    import torch

    torch.set_num_threads(1)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    squares = torch.full((numel,), 50.0)  # so noisy that VGC sends few
    x = gradient.clone()
    shapes = ((numel // 2048, 1024), (numel - numel // 2048 * 1024,))
    step_of = new_steps if _is_new() else old_steps
    runs = {name: step_of(text, shapes, x, squares) for name, text in SPECS.items()}
    runs["decode 4"] = (new_decode if _is_new() else old_decode)(numel, x)
    print("ready", flush=True)
    for line in sys.stdin:
        x.copy_(gradient)
        started = time.perf_counter()
        runs[line.strip()]()
        print(1e3 * (time.perf_counter() - started), flush=True)


def _is_new() -> bool:
    import tersegrad.core

    return hasattr(tersegrad.core, "Layout")


def new_steps(text, shapes, x, squares):
    from tersegrad import parse
    from tersegrad.core import Comm, Layout, Pending, Step, state

    class Done(Pending):
        def wait(self):
            pass

    class Alone(Comm):
        rank, size = 0, 1

        def start_all_reduce(self, x):
            return Done()

        def all_gather(self, x): ...
        def start_shift(self, x, into, by=1): ...
        def broadcast(self, x, root=0): ...

    layout, reducer, comm = Layout(("w", "b"), shapes), parse(text), Alone()
    memory, number = reducer.init(layout, comm), iter(range(10**9))

    def step():
        reducer.start(Step(layout, next(number), 0.1, squares), x, x, memory, comm)()
        state.commit(memory)

    return step


def old_steps(text, shapes, x, squares):
    from tersegrad import parse, state
    from tersegrad.core import Bucket, Comm

    class Alone(Comm):
        rank, size = 0, 1

        def all_reduce(self, x): ...
        def all_gather(self, x): ...
        def start_shift(self, x, into, by=1): ...
        def broadcast(self, x, root=0): ...

    bucket, reducer, comm = Bucket(("w", "b"), shapes, lr=0.1, squares=squares), parse(text), Alone()
    memory = reducer.init(bucket, comm)

    def step():
        reducer.start(bucket, x, x, memory, comm)()
        state.settle(memory, keep=True)

    return step


def new_decode(numel, x):
    from tersegrad import TopK
    from tersegrad.core import Layout, Payload, decode_sum

    compressor, layout, payloads = TopK(0.01), Layout.flat(numel), []
    for shift in range(4):
        made = compressor.encode(x.roll(shift), compressor.init(layout, 0))
        payloads.append(Payload(made.body.clone(), made.numel, made.meta))
    state, out = compressor.init(layout, 0), x.clone()
    return lambda: decode_sum(compressor, payloads, 0.25, out, state)


def old_decode(numel, x):
    from tersegrad import TopK
    from tersegrad.core import Bucket, Payload

    compressor, bucket, payloads = TopK(0.01), Bucket.flat(numel), []
    for shift in range(4):
        made = compressor.encode(x.roll(shift), compressor.init(bucket, 0))
        payloads.append(Payload(made.body.clone(), made.numel))
    state, out = compressor.init(bucket, 0), x.clone()
    return lambda: compressor.sum_decoded(payloads, 0.25, out, state)


def start(checkout: Path, numel: int) -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), str(checkout), "--serve", "--numel", str(numel)],
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "ready\n"
    return child


def ask(child: subprocess.Popen, name: str) -> float:
    child.stdin.write(f"{name}\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of another version")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--numel", type=int, default=8_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    if args.serve:
        serve(args.numel)
        return
    here = Path(__file__).resolve().parents[1]
    children = {"other": start(args.other.resolve(), args.numel), "this": start(here, args.numel)}
    names = [*SPECS, "decode 4"]
    times: dict[str, dict[str, list[float]]] = {name: {"other": [], "this": []} for name in names}
    for turn in range(args.rounds + 3):
        for name in names:
            for version in sorted(children, reverse=bool(turn % 2)):
                ms = ask(children[version], name)
                if turn >= 3:
                    times[name][version].append(ms)
    for child in children.values():
        child.stdin.close()
        child.wait()
    print(f"{args.numel} floats, {args.rounds} rounds; ms, medians; this version over the other, round by round")
    for name, found in times.items():
        ratios = sorted(a / b for a, b in zip(found["this"], found["other"], strict=True))
        low, high = ratios[len(ratios) // 5], ratios[-1 - len(ratios) // 5]
        other, this = (statistics.median(found[version]) for version in ("other", "this"))
        print(f"{name:<12} {other:8.2f} {this:8.2f}   {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]")
    if args.json:
        rows = [{"what": n, **{v: found[v] for v in found}, "numel": args.numel} for n, found in times.items()]
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
