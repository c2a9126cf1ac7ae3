"""``tersegrad plan``: from the request to the printed answer."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tersegrad.comm.units import parse_rate, parse_time, show_bytes
from tersegrad.core.environment import environment
from tersegrad.plan import advice, break_even, codecs, model
from tersegrad.plan.advice import Setting
from tersegrad.plan.codecs import BucketCost, Network
from tersegrad.plan.cost import Link
from tersegrad.plan.probe import SPECS, Profile, contention_of
from tersegrad.plan.step_time import OVERHEAD
from tersegrad.specs import parse_reducer


@dataclass(frozen=True)
class Request:
    """The arguments of ``tersegrad plan``."""

    specs: tuple[str, ...] = ()
    model: str | None = None
    params: int | None = None
    workers: tuple[int, ...] = ()  # several: scaling curves
    bandwidth: str | None = None
    latency: str | None = None
    compute: str | None = None
    profile: Path | None = None
    picture: Path = Path("plan.png")


def parse_workers(text: str) -> tuple[int, ...]:
    """One number, or from..to, doubling.

    >>> parse_workers("16"), parse_workers("4..32")
    ((16,), (4, 8, 16, 32))
    """
    low, dots, high = text.partition("..")
    if not low.isdigit() or (dots and not high.isdigit()) or not 1 <= int(low) <= int(high or low):
        raise ValueError(f"--workers {text}: write a number, as 16, or a range, as 4..1024.")
    numbers = [int(low)]
    while numbers[-1] < int(high or low):
        numbers.append(min(2 * numbers[-1], int(high)))
    return tuple(numbers)


Draw = Callable[[Sequence[int], dict[str, list[float]], float, str, Path], object]


def run(request: Request, draw: Draw) -> str:
    """Return the whole answer as text; scaling curves are drawn into a file by ``draw``."""
    profile = _complete(_known(request), request.specs)
    workers = request.workers or (profile.workers,)
    setting = Setting(workers[0], profile.network, profile.compute, profile.contention)
    ranked = advice.rank(profile.costs, setting)
    limits = break_even.lines(profile.costs, ranked, setting)
    parts = [_about(setting, profile), advice.show(ranked), limits, _notes(profile), advice.answer(ranked)]
    if len(workers) > 1:
        parts.append(_scaling(profile, setting, workers, request.picture, draw))
    return "\n\n".join(part for part in parts if part)


def _known(request: Request) -> Profile:
    """The profile before any codec is timed: model, network and computation."""
    if request.profile is not None:
        if request.model or request.params or request.compute:
            raise ValueError("a profile says what the model is. Leave out --model, --params and --compute.")
        profile = Profile.load(request.profile)
        return replace(profile, network=_network(request, profile.network))
    if (request.model is None) == (request.params is None):
        raise ValueError("say what the model is: --model module:factory, or --params 25.6M, or --profile FILE.")
    if not request.workers:
        raise ValueError("say how many workers there are: --workers 16, or a range, --workers 4..1024.")
    seconds = parse_time(request.compute) if request.compute else 0.0
    module, loss = model.load(request.model) if request.model else (None, None)
    if loss is not None and module is not None and not request.compute:
        timeline, buckets = model.measure(module, loss)
    else:
        buckets = model.buckets_of_size(request.params or 0) if module is None else model.buckets_of(module)
        timeline = model.compute_of(seconds, buckets)
    contention = contention_of(os.cpu_count() or 1, 1)  # one worker per machine
    network = _network(request, Network(Link(), Link(overhead=OVERHEAD)))
    return Profile(request.workers[0], network, timeline, buckets, {}, contention, environment())


def _network(request: Request, known: Network) -> Network:
    """The measured network, overridden by the request."""
    said: dict[str, float] = {}
    if request.bandwidth is not None:
        said["bandwidth"] = parse_rate(request.bandwidth)
    if request.latency is not None:
        said["latency"] = parse_time(request.latency)
    return Network(replace(known.all_reduce, **said), replace(known.messages, **said))


def _complete(profile: Profile, specs: Sequence[str]) -> Profile:
    """Add the costs of all requested specs; those that are not in the profile are measured now."""
    wanted = list(specs) or list(profile.costs) or list(SPECS)
    for plain in ("bf16", "none"):
        if plain not in wanted:
            wanted.insert(0, plain)  # needed for the comparison
    reducers = {text: parse_reducer(text) for text in wanted}  # an invalid spec is an error before anything is timed
    gradients = model.gradients_for(profile.buckets, None) if set(wanted) - set(profile.costs) else []
    costs: dict[str, list[BucketCost]] = {}
    for text, reducer in reducers.items():
        costs[text] = profile.costs.get(text) or codecs.measure_all(reducer, profile.buckets, gradients)
    return replace(profile, costs=costs)


def _about(setting: Setting, profile: Profile) -> str:
    numel = sum(bucket.numel for bucket in profile.buckets)
    link = setting.network.all_reduce
    rate = "unlimited" if link.bandwidth == float("inf") else f"{8e-6 * link.bandwidth:.4g} Mbit/s"
    return (
        f"{setting.workers} workers, {rate}, {1e3 * link.latency:.3g} ms a hop; {numel / 1e6:.4g} M parameters "
        f"({show_bytes(4 * numel)}) in {len(profile.buckets)} buckets; a step without communication takes "
        f"{1e3 * setting.compute.seconds:.4g} ms"
    )


def _notes(profile: Profile) -> str:
    if profile.compute.seconds > 0:
        return ""
    return (
        "Nothing is known about the computation, so nothing hides behind it: times are of communication and coding "
        "alone. Say how long a step takes without communication (--compute 120ms), or give a profile."
    )


def _scaling(profile: Profile, setting: Setting, workers: Sequence[int], picture: Path, draw: Draw) -> str:
    steps = advice.curves(profile.costs, setting, workers)
    link = setting.network.all_reduce
    rate = "" if link.bandwidth == float("inf") else f"at {8e-6 * link.bandwidth:.4g} Mbit/s"
    draw(workers, steps, setting.compute.seconds, rate, picture)
    spans = [
        f"  {low if low == high else f'{low} to {high}'} workers: {spec}"
        for low, high, spec in advice.best_by_workers(steps, workers)
    ]
    return "\n".join(["Fastest, predicted:", *spans, f"Picture: {picture}"])
