"""What squares per sample cost: forward and backward with ``PerSample`` against plain forward and backward.

    python benchmarks/per_sample.py [--rounds N] [--json FILE]

One thread; all contestants take turns within each round. Opacus, where it is installed and knows the model, computes
the gradients of all samples, and the sums of their squares are taken from those. Memory is the largest total that
torch's allocator had given out at any time of one step, with parameters, sums and batch.
"""

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from tersegrad.lab.timing import Times, environment, interleave, write_rows
from tersegrad.lab.workloads import Batch, find
from tersegrad.per_sample import PerBackward, PerSample, SquaredGradients

Loss = Callable[[nn.Module], Tensor]


@dataclass
class Case:
    """A model, and its loss on one fixed batch."""

    model: nn.Module
    batch: list[Tensor]
    loss: Loss
    opacus: bool = False  # it knows neither batch norm nor torch's LSTM


@dataclass
class Contestant:
    """A step, and what it holds between steps."""

    step: Callable[[], None]
    held: list[Tensor]


def small_cnn() -> Case:
    """Three 3x3 convolutions with 32, 64, 128 channels and two linear layers, on 64 images of CIFAR's size."""
    layers: list[nn.Module] = []
    for channels, width in [(3, 32), (32, 64), (64, 128)]:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10))
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return Case(model, [x, y], lambda model: functional.cross_entropy(model(x), y), opacus=True)


def images(name: str, channels: int, size: int, opacus: bool = False) -> Case:
    """One of the lab's workloads, with noise for images, channels last as the lab has them."""
    workload = find(name)
    x, y = torch.randn(workload.batch, size, size, channels).permute(0, 3, 1, 2), torch.randint(10, (workload.batch,))
    return Case(workload.model(0), [x, y], lambda model: workload.loss(model, Batch(x, y, 0))[0], opacus)


def words() -> Case:
    """The lab's small LSTM on random words."""
    workload = find("ptb-lstm-small")
    x, y = torch.randint(10_000, (2, workload.batch, 35))
    return Case(workload.model(0), [x, y], lambda model: workload.loss(model, Batch(x, y, 0))[0])


CASES: dict[str, Callable[[], Case]] = {
    "small CNN, batch 64": small_cnn,
    "fashion, batch 32": lambda: images("fashion", 1, 28, opacus=True),
    "cifar-resnet20, batch 32": lambda: images("cifar-resnet20", 3, 32),
    "cifar-vgg-slim, batch 32": lambda: images("cifar-vgg-slim", 3, 32),
    "ptb-lstm-small, batch 5": words,
}


def contestants(case: Case) -> dict[str, Contestant]:
    """Copies of one model, watched in different ways."""
    result = {"plain": _contestant(case, None), "PerSample": _contestant(case, PerSample)}
    result["sampled"] = _contestant(case, partial(PerSample, sampled=True))
    result["PerBackward"] = _contestant(case, PerBackward)
    if case.opacus and find_spec("opacus"):
        result["Opacus"] = opacus(case)
    return result


def _contestant(case: Case, kind: Callable[[nn.Module], SquaredGradients] | None) -> Contestant:
    model = copy.deepcopy(case.model)
    recorder = None if kind is None else kind(model)

    def step() -> None:
        model.zero_grad()
        if recorder is not None:
            recorder.clear()
        case.loss(model).backward()

    sums = [] if recorder is None else [recorder.of(p) for p in model.parameters()]
    return Contestant(step, [*model.parameters(), *case.batch, *sums])


def opacus(case: Case) -> Contestant:
    """The same squares from Opacus."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.grad_sample import GradSampleModule

        model: Any = GradSampleModule(copy.deepcopy(case.model), loss_reduction="sum")
    sums = [torch.zeros_like(p) for p in model.parameters()]

    def step() -> None:
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.loss(model).backward()
        for p, total in zip(model.parameters(), sums, strict=True):
            torch.sum(p.grad_sample.square_(), 0, out=total)
            p.grad_sample = None

    return Contestant(step, [*model.parameters(), *case.batch, *sums])


def peak_bytes(contestant: Contestant) -> int:
    """The most that torch's allocator had given out at any time of a step, with what is held all the time."""
    contestant.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contestant.step()
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    now = peak = 0
    for _, size in sorted(_allocations(tree)):
        now += size
        peak = max(peak, now)
    return peak + sum(tensor.numel() * tensor.element_size() for tensor in contestant.held)


def _allocations(events: list[Any]) -> Iterator[tuple[int, int]]:
    """(when, bytes) of every block given out, and with a minus given back."""
    for event in events:
        if event.typed[0] == _EventType.Allocation:
            yield event.start_time_ns, event.typed[1].alloc_size
        yield from _allocations(event.children)


def show(times: dict[str, Times], peaks: dict[str, int]) -> None:
    """Every contestant against the plain one."""
    for name, measured in times.items():
        slower = measured.median / times["plain"].median
        memory = f"{peaks[name] / 1e6:6.1f} MB = {peaks[name] / peaks['plain']:.2f}x"
        print(f"  {name:<12} {measured!s:<24} = {slower:.2f}x   {memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path, help="write one row per measurement to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not find_spec("opacus"):
        print("Opacus is not installed, so it is not measured: pip install opacus")
    rows = []
    print("forward and backward, one thread; ms, median [20 %, 80 %]; peak memory of a step")
    for name, make in CASES.items():
        print(name)
        field = contestants(make())
        peaks = {who: peak_bytes(contestant) for who, contestant in field.items()}
        times = interleave({who: contestant.step for who, contestant in field.items()}, args.rounds)
        show(times, peaks)
        for who, measured in times.items():
            for i, ms in enumerate(measured.rounds):
                rows.append({"case": name, "what": who, "round": i, "ms": ms, "peak_bytes": peaks[who]})
    if args.json:
        write_rows(args.json, ({**row, **environment()} for row in rows))


if __name__ == "__main__":
    main()
