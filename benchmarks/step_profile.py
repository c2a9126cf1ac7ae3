"""Where the milliseconds of a step go: forward, backward, update; and beside backward encode, wait, decode.

python benchmarks/step_profile.py [SPEC ...] [--workload cifar-vgg] [--batch 8] [--workers 4] [--bandwidth 100Mbit]
    [--bucket-mb 25] [--rounds 7] [--steps 6] [--seconds 20] [--data DIR] [--json FILE]

All specs train in turn, in the same processes in the lab's network (``contenders.py``): a block of steps each, a round
of blocks after the other. Shown is the median over the rounds; "of no network" is the median of the rounds' own ratios
to ``torch:noop``, a hook that returns at once, with the least and the most.

``backward`` is the whole call, with what communication could not hide in it: "exposed" is what it takes longer than
without a network. "rest" is batches, the loop itself, and waiting for the slowest rank at the end of a block. "cpu" is
the processor time of rank 0's process, all threads together, and "kernel" the part of it that Linux took. Encode, wait
and decode are those of rank 0's worker thread, which runs beside backward. "fixed" is what of encode and decode does
not depend on the length, nearly all of it Python: the same buckets with 8 to 64 floats in each tensor, one core,
nothing else running.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import contenders
from contenders import MAIN, WORKER, Block, Contender, of
from tersegrad.core import Layout
from tersegrad.lab import workloads
from tersegrad.lab.methods import Method
from tersegrad.lab.timing import environment, write_rows
from tersegrad.plan import codecs, model
from tersegrad.plan.cost import payloads_decoded

NO_NETWORK = "torch:noop"
SPECS = (NO_NETWORK, "none", "topk", "sidco", "powersgd")


def main() -> None:
    if "--worker" in sys.argv:
        work(json.loads(sys.argv[-1]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=list(SPECS))
    parser.add_argument("--workload", default="cifar-vgg")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--bandwidth", default="100Mbit", help="none: not limited")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="of a block; the first is not counted")
    parser.add_argument("--seconds", type=float, default=20.0, help="a block that would take longer has fewer steps")
    parser.add_argument("--settle", type=int, default=4, help="steps before all that; DDP makes new buckets in them")
    contenders.add_arguments(parser)
    args = parser.parse_args()
    if NO_NETWORK not in args.specs:
        args.specs.insert(0, NO_NETWORK)
    with tempfile.TemporaryDirectory(prefix="tersegrad-profile-") as folder:
        about = {key: getattr(args, key) for key in ("specs", "rounds", "steps", "seconds", "settle")}
        about["blocks"] = f"{folder}/blocks.json"
        contenders.run(__file__, args, args.workers, None if args.bandwidth == "none" else args.bandwidth, about)
        blocks = json.loads(Path(about["blocks"]).read_text())
    rows = [profile(spec, blocks, args.workload, args.workers) for spec in blocks]
    show(rows)
    if args.json is not None:
        about = {key: getattr(args, key) for key in ("workload", "batch", "workers", "bandwidth", "steps", "rounds")}
        write_rows(args.json, [{**about, **row, **environment()} for row in rows])


def work(about: dict[str, Any]) -> None:
    """One worker."""
    contenders.begin()
    racing = {spec: Contender(about, spec) for spec in about["specs"]}
    for contender in racing.values():
        contender.run(about["settle"])
    blocks = contenders.take_turns(racing, about["rounds"], about["steps"], about["seconds"])
    if dist.get_rank() == 0:
        Path(about["blocks"]).write_text(json.dumps(blocks))
    contenders.end(racing)


def profile(spec: str, blocks: dict[str, list[Block]], workload: str, workers: int) -> dict[str, Any]:
    """Milliseconds of a step by part."""
    mine, silent = blocks[spec], blocks[NO_NETWORK]
    row: dict[str, Any] = {"spec": spec} | {part: statistics.median(of(part, mine)) for part in mine[0]}
    return row | {
        "rest": row["step"] - sum(row[part] for part in MAIN),
        "exposed": row["backward"] - statistics.median(of("backward", silent)),
        "fixed": fixed_ms(spec, workload, workers),
        "rounds_ms": of("step", mine),
        "of_no_network": contenders.ratios(of("step", mine), of("step", silent)),
    }


def fixed_ms(spec: str, workload: str, workers: int) -> float | None:
    """Encode and decode of the workload's buckets with next to nothing in them; None for what is not ours."""
    reducer = Method(spec).settled().reducer()
    if reducer is None:
        return None
    torch.set_num_threads(1)
    total = 0.0
    for bucket in model.buckets_of(workloads.find(workload).model(0)):
        tiny = Layout(bucket.names, tuple((8, 8) if len(shape) > 1 else (8,) for shape in bucket.shapes))
        cost = codecs.measure(reducer, tiny, torch.randn(tiny.numel))
        decoded = max((payloads_decoded(exchange, workers) for exchange, _ in cost.messages), default=1.0)
        total += cost.encode + decoded * cost.decode
    return 1e3 * total


def show(rows: list[dict[str, Any]]) -> None:
    """A table in milliseconds."""
    parts = ("step", "cpu", "kernel", *MAIN, "rest", "exposed", *WORKER, "fixed")
    print(f"\n{'':60}{'of no network':>22}" + "".join(f"{part:>9}" for part in parts))
    for row in rows:
        times = row["of_no_network"]
        against = f"{statistics.median(times):.2f} [{min(times):.2f}, {max(times):.2f}]"
        cells = "".join(f"{'-':>9}" if row.get(part) is None else f"{row[part]:9.1f}" for part in parts)
        print(f"{row['spec']:<60}{against:>22}{cells}")


if __name__ == "__main__":
    main()
