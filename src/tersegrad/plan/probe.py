"""Measure the inputs of a prediction: the real network, the codecs on this machine, the model's own backward.

    torchrun --nproc-per-node 4 -m tersegrad.plan.probe --model train:make_model --out profile.json topk powersgd

Run it as the training will be run: on the same machines, with as many workers. Rank 0 writes the profile, which
``tersegrad plan --profile profile.json`` reads.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tersegrad.comm.numbers import all_gather_floats
from tersegrad.comm.throttled import Throttled
from tersegrad.comm.torch import TorchComm
from tersegrad.comm.units import parse_time
from tersegrad.core import Comm, Layout
from tersegrad.core.environment import environment
from tersegrad.plan import codecs, model, sync_overhead
from tersegrad.plan.codecs import BucketCost, Network
from tersegrad.plan.cost import ALL_GATHER, ALL_REDUCE, Link, load
from tersegrad.plan.timeline import Compute, simulate
from tersegrad.specs import parse_reducer

FORMAT = 2
SIZES = (1_000, 16_000, 128_000, 1_000_000, 8_000_000)  # bytes
ROUNDS = 7
BURST = 64  # messages
ENOUGH = 1.5  # seconds: a size that takes longer is the last one, and is measured in few rounds
SPECS = (
    *("none", "bf16", "topk", "topk8", "topk4", "sidco", "powersgd", "qsgd"),
    "ErrorFeedback(TwoShot(TopK(ratio=0.01)))",
)


@dataclass(frozen=True)
class Profile:
    """All measurements: the input of ``tersegrad plan``."""

    workers: int
    network: Network
    compute: Compute
    buckets: list[Layout]
    costs: dict[str, list[BucketCost]]  # by spec, one per bucket
    contention: float  # of backward and the worker thread for cores
    environment: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        about = {"workers": self.workers, "contention": self.contention, "environment": self.environment}
        body = {
            "network": asdict(self.network),
            "compute": asdict(self.compute),
            "buckets": [{"names": b.names, "shapes": b.shapes} for b in self.buckets],
            "costs": {spec: [asdict(cost) for cost in costs] for spec, costs in self.costs.items()},
        }
        path.write_text(json.dumps({"format": FORMAT, **about, **body}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> "Profile":
        """Read a profile that ``save`` wrote; ValueError if it is none."""
        try:
            raw = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not a profile: {error}.") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"{path} is not a profile of format {FORMAT}. Make one with python -m {__name__}.")
        raw["compute"]["ready"] = tuple(raw["compute"]["ready"])
        return Profile(
            workers=raw["workers"],
            network=Network(**{name: Link(**link) for name, link in raw["network"].items()}),
            compute=Compute(**raw["compute"]),
            buckets=[Layout(tuple(b["names"]), tuple(map(tuple, b["shapes"]))) for b in raw["buckets"]],
            costs={spec: [_cost(c) for c in costs] for spec, costs in raw["costs"].items()},
            contention=raw["contention"],
            environment=raw["environment"],
        )


def _cost(raw: dict[str, Any]) -> BucketCost:
    return BucketCost(**{**raw, "messages": tuple((exchange, nbytes) for exchange, nbytes in raw["messages"])})


def contention_of(cores: int, workers_here: int) -> float:
    """How much the worker thread slows backward down: 0 from two cores per worker on, 1 with one core or less.

    >>> contention_of(cores=8, workers_here=4), contention_of(cores=2, workers_here=4)
    (0.0, 1.0)
    """
    return min(1.0, max(0.0, 2.0 - cores / workers_here))


# ---- the network ---------------------------------------------------------------------------------


def measure_network(comm: Comm, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> Network:
    """Fit bandwidth and latency of all-reduces and of messages to all others; the same result on all workers."""
    if comm.size == 1:
        return Network.of(Link())
    overhead = _measure_overhead(comm, rounds)
    return Network(
        _measure_link(comm, ALL_REDUCE, lambda x: comm.all_reduce(x.view(torch.float32)), sizes, rounds),
        _measure_link(comm, ALL_GATHER, lambda x: _to_all(comm, x), sizes, rounds, overhead),
    )


def _to_all(comm: Comm, x: Tensor) -> None:
    """The pattern of ``comm.exchange.start_gather``."""
    under_way = [comm.start_shift(x, torch.empty_like(x), by) for by in range(1, comm.size)]
    for message in under_way:
        message.wait()


def _measure_overhead(comm: Comm, rounds: int) -> float:
    """Seconds to start a message, from the difference between many short messages in flight and one."""

    def burst(count: int) -> float:
        def send(x: Tensor) -> None:
            for message in [comm.start_shift(x, torch.empty_like(x)) for _ in range(count)]:
                message.wait()

        return statistics.median(_timed(comm, send, torch.zeros(8, dtype=torch.uint8))[0] for _ in range(rounds))

    return max(0.0, burst(BURST) - burst(1)) / (BURST - 1)


def _measure_link(
    comm: Comm,
    exchange: str,
    send: Callable[[Tensor], object],
    sizes: Sequence[int],
    rounds: int,
    overhead: float = 0.0,
) -> Link:
    points, busy = [], 0.0
    for size in sizes:
        x = torch.zeros(-(-size // 4) * 4, dtype=torch.uint8)
        times = [_timed(comm, send, x)]
        slow = times[0][0] > ENOUGH
        times = [_timed(comm, send, x) for _ in range(2 if slow else rounds)]
        seconds, busy = statistics.median(t for t, _ in times), statistics.median(b for _, b in times)
        asked = load(exchange, comm.size, x.numel())
        points.append((asked.sent, asked.hops, seconds - asked.messages * overhead))
        if slow:
            break
    return replace(fit(points), overhead=overhead, busy=busy)


def _timed(comm: Comm, send: Callable[[Tensor], object], x: Tensor) -> tuple[float, float]:
    """Seconds until the last worker is done, and the share of busy processor time; the same on all workers."""
    comm.all_reduce(torch.zeros(1))  # all workers begin together
    started, worked = time.perf_counter(), time.process_time()
    send(x)
    seconds, work = time.perf_counter() - started, time.process_time() - worked
    every, works = zip(*all_gather_floats([seconds, work], comm), strict=True)
    longest = max(every)
    return longest, min(1.0, statistics.mean(works) / longest) if longest > 0 else 0.0


def fit(points: Sequence[tuple[float, float, float]]) -> Link:
    """Fit a link to (bytes, hops, seconds): the median slope between all pairs, then the median intercept.

    This is the Theil-Sen estimator: almost a third of the points may be outliers.

    >>> link = fit([(0, 2, 0.02), (1000, 2, 0.03), (9000, 2, 0.11), (5000, 2, 9.9)])
    >>> round(link.bandwidth), round(link.latency, 6)
    (100000, 0.01)
    """
    slopes = [(t2 - t1) / (b2 - b1) for (b1, _, t1), (b2, _, t2) in combinations(points, 2) if b2 != b1]
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    rest = [(seconds - slope * nbytes) / hops for nbytes, hops, seconds in points if hops]
    latency = max(0.0, statistics.median(rest)) if rest else 0.0
    return Link(1 / slope if slope else float("inf"), latency)


# ---- all of it -----------------------------------------------------------------------------------


def measure(
    comm: Comm,
    specs: Sequence[str],
    module: torch.nn.Module,
    loss: model.Loss | None,
    compute: float | None = None,
    step: Callable[[], object] | None = None,
    sizes: Sequence[int] = SIZES,
) -> Profile:
    """Measure a profile of this model on this machine and network. All workers must call it at the same time."""
    network = measure_network(comm, sizes)
    contention = contention_of(os.cpu_count() or 1, _workers_here(comm))
    if loss is None:
        buckets = model.buckets_of(module)
        timeline = model.compute_of(compute or 0.0, buckets)
    else:
        comm.all_reduce(torch.zeros(1))
        timeline, buckets = model.measure(module, loss, step, comm)
        whole = sync_overhead.measure(module, loss, step, buckets, lambda x: _to_all(comm, x), comm)
        word = codecs.split(
            BucketCost(0, 0.0, 0.0, ((ALL_GATHER, sync_overhead.NBYTES),), 0), comm.size, network
        ).service
        explained = simulate(timeline, [word] * len(buckets), contention).seconds
        timeline = replace(timeline, pace=max(0.0, whole - explained))
    gradients = model.gradients_for(buckets, module)
    comm.all_reduce(torch.zeros(1))
    costs = {text: codecs.measure_all(parse_reducer(text), buckets, gradients) for text in specs}
    return Profile(comm.size, network, timeline, buckets, costs, contention, environment())


def _workers_here(comm: Comm) -> int:
    """How many workers share this machine."""
    mine = torch.frombuffer(bytearray(socket.gethostname().encode()), dtype=torch.uint8)
    return sum(theirs.tolist() == mine.tolist() for theirs in comm.all_gather(mine))


def main(argv: list[str] | None = None) -> None:
    """The command line, to be run under torchrun."""
    parser = argparse.ArgumentParser(prog="python -m tersegrad.plan.probe", description=__doc__)
    parser.add_argument("spec", nargs="*", default=list(SPECS), help="what to measure (default: one of each kind)")
    parser.add_argument("--model", required=True, help="module:factory, giving a model or (model, loss function)")
    parser.add_argument("--compute", help="time of a step without communication, where there is no loss function")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--bandwidth", help="emulate a link as slow as this, e.g. 100Mbit")
    parser.add_argument("--latency", help="of the emulated link, one way")
    parser.add_argument("--threads", type=int, default=1, help="of torch in every worker (default: 1)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    module, loss = model.load(args.model)
    dist.init_process_group("gloo")
    try:
        own = TorchComm(dist.new_group())
        slow = args.bandwidth is not None or args.latency is not None
        comm = Throttled(args.bandwidth, latency=args.latency or "0s")(own) if slow else own
        profile = measure(comm, args.spec, module, loss, None if args.compute is None else parse_time(args.compute))
        if dist.get_rank() == 0:
            profile.save(args.out)
            print(f"written: {args.out}")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
