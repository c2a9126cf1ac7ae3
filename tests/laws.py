"""The laws of ``tersegrad.core``: each runs one spec on N workers and raises AssertionError if it is broken."""

import io
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tersegrad import inspection, local, spec, state
from tersegrad.core import Bucket, Comm, Compressor, Reducer, Spec, State

BUCKET = Bucket(("a.weight", "a.bias", "b.weight", "c.weight"), ((37, 20), (20,), (50, 31), (3, 5, 3, 3)), seed=7)

Gradient = Callable[[int, int], Tensor]  # (rank, step) -> flat gradient


def laplace(numel: int) -> Gradient:
    """Heavy-tailed gradients, different for every worker and step, with exact zeros among them."""

    def gradient(rank: int, step: int) -> Tensor:
        rng = np.random.default_rng([numel, rank, step])
        x = rng.laplace(scale=10.0 ** rng.uniform(-3, 0), size=numel)
        x[rng.random(numel) < 0.05] = 0.0
        return torch.from_numpy(x.astype(np.float32))

    return gradient


def squares(x: Tensor) -> Tensor:
    """Sums of squares over samples that agree in some elements and contradict each other in others."""
    return x.square() * (0.1 + 0.4 * (torch.arange(x.numel()) % 7))


def learning_rate(step: int) -> float:
    """One that drops."""
    return 0.1 * 0.5**step


@dataclass
class Trace:
    """What one worker saw: the gradient, the mean and the rest of every step, and the state at the end."""

    gradients: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    rests: list[Tensor] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # memory after each step
    state: State = field(default_factory=dict)


def run(
    reducer: Reducer,
    size: int,
    gradient: Gradient,
    bucket: Bucket = BUCKET,
    steps: int = 3,
    first: int = 0,
    states: list[State] | None = None,
    in_place: bool = False,
    between: Callable[[State], None] = lambda state: None,
) -> list[Trace]:
    """``steps`` steps on ``size`` workers; one trace per worker."""

    def work(comm: Comm) -> Trace:
        mine = Bucket(bucket.names, bucket.shapes, seed=bucket.seed)  # buckets are the hook's own: one per worker
        trace = Trace(state=reducer.init(mine, comm))
        if states is not None:
            state.paste(state.cut(states[comm.rank], mine), trace.state, mine)
        for step in range(first, first + steps):
            mine.step = step
            x = gradient(comm.rank, step)
            mine.squares, mine.lr = squares(x), learning_rate(step)
            trace.gradients.append(x.clone())
            out = x if in_place else torch.full_like(x, 123.0)
            before = state.copy(trace.state)
            reducer.reduce(mine, x, out, trace.state, comm)
            assert _same(before, state.copy(trace.state)), (
                "reduce changed the state itself; changes are noted with later()"
            )
            state.settle(trace.state, keep=bool(out.isfinite().all()))
            trace.means.append(out.clone())
            trace.rests.append(x.clone())
            trace.held.append(held(trace.state, mine))
            between(trace.state)
        return trace

    return local.run(size, work)


def held(state_: State, bucket: Bucket) -> Tensor:
    """The part of past gradients that a reducer still remembers, element by element."""
    pieces = state.cut(state_, bucket)
    parts = [_residual(pieces[name], size) for name, size in zip(bucket.names, bucket.sizes, strict=True)]
    return torch.cat(parts) if parts else torch.zeros(0)


def _residual(piece: State, size: int) -> Tensor:
    total = torch.zeros(size)
    for key, value in piece.items():
        if isinstance(value, dict):
            total = total + _residual(value, size)
        elif key == "residual":
            total = total + value.reshape(-1)
    return total


def mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).double().mean(0)


def tolerance(reducer: Reducer, scale: float, size: int, lost: float = 0.25) -> float:
    """Rounding of float32 sums; or ``lost``, for a reducer that throws something away on purpose."""
    return scale * (2.0**-20 * size if reducer.conserves else lost) + size * 2.0**-148  # and of denormals


def assert_close(got: Tensor, want: Tensor, atol: float, what: str) -> None:
    worst = float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
    assert worst <= atol, f"{what}: off by {worst:.3g}, allowed {atol:.3g}"


def largest(traces: list[Trace]) -> float:
    return max((float(g.abs().max()) for t in traces for g in t.gradients if g.numel()), default=0.0)


# ---- the laws ------------------------------------------------------------------------------------


def check_conservation(
    reducer: Reducer, size: int, gradient: Gradient, bucket: Bucket = BUCKET, lost: float = 0.25
) -> None:
    """Mean of what left x and memory == out, at every step; nothing appears, nothing is lost (or just so much)."""
    traces = run(reducer, size, gradient, bucket)
    atol = tolerance(reducer, 4 * largest(traces), size, lost)
    before = [torch.zeros(bucket.numel) for _ in traces]
    for step in range(len(traces[0].means)):
        left = [
            t.gradients[step].double() + b.double() - t.rests[step].double() - t.held[step].double()
            for t, b in zip(traces, before, strict=True)
        ]
        assert_close(traces[0].means[step], mean(left), atol, f"conservation at step {step}")
        before = [t.held[step] for t in traces]


def check_replicas_identical(reducer: Reducer, size: int, gradient: Gradient, bucket: Bucket = BUCKET) -> None:
    """The same bits on every worker."""
    traces = run(reducer, size, gradient, bucket)
    for trace in traces[1:]:
        for step, (a, b) in enumerate(zip(traces[0].means, trace.means, strict=True)):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32)), f"replicas differ at step {step}"


def check_in_place(reducer: Reducer, size: int, gradient: Gradient) -> None:
    """``out`` may be ``x``: the mean does not change by it."""
    apart = run(reducer, size, gradient)
    together = run(reducer, size, gradient, in_place=True)
    for step, (a, b) in enumerate(zip(apart[0].means, together[0].means, strict=True)):
        assert torch.equal(a, b), f"reducing in place gives another mean at step {step}"


def check_telescoping(reducer: Reducer, size: int, gradient: Gradient, steps: int = 8) -> None:
    """Sum of means + mean memory == sum of mean gradients, for reducers that remember all they do not send."""
    traces = run(reducer, size, gradient, steps=steps)
    sent = torch.stack(traces[0].means).double().sum(0)
    late = mean([t.held[-1] for t in traces])
    total = mean([torch.stack(t.gradients).double().sum(0) for t in traces])
    assert_close(sent + late, total, tolerance(reducer, steps * largest(traces), size), "telescoping sum")


def check_stays_inside(reducer: Reducer, size: int, gradient: Gradient) -> None:
    """Memory around ``x`` and ``out`` is not touched."""
    n, guard = BUCKET.numel, 64

    def work(comm: Comm) -> None:
        big_x, big_out = torch.full((2, n + 2 * guard), 77.0)
        x, out = big_x[guard : guard + n], big_out[guard : guard + n]
        x.copy_(gradient(comm.rank, 0))
        bucket = Bucket(BUCKET.names, BUCKET.shapes, squares=squares(x), lr=0.1)
        reducer.reduce(bucket, x, out, reducer.init(bucket, comm), comm)
        for big in (big_x, big_out):
            around = torch.cat([big[:guard], big[guard + n :]])
            assert bool((around == 77.0).all()), "memory outside x or out was written"

    local.run(size, work)


def check_repr(thing: Spec) -> None:
    """The repr is the expression."""
    again = spec.parse(repr(thing))
    assert again == thing, f"parse({thing!r}) == {again!r}"
    assert again.fingerprint() == thing.fingerprint()


def check_checkpoint(reducer: Reducer, size: int, gradient: Gradient) -> None:
    """Saved with torch.save, loaded with weights_only, cut and joined: goes on as if nothing had happened."""
    whole = run(reducer, size, gradient, steps=5)
    half = run(reducer, size, gradient, steps=3)
    buffer = io.BytesIO()
    torch.save([state.copy(t.state) for t in half], buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    resumed = run(reducer, size, gradient, steps=2, first=3, states=loaded)
    for step in (0, 1):
        same = torch.equal(whole[0].means[3 + step], resumed[0].means[step])
        assert same, f"a resumed run differs in step {3 + step}"


def check_scratch_is_scratch(reducer: Reducer, size: int, gradient: Gradient) -> None:
    """Keys that begin with _ may vanish between steps."""
    kept = run(reducer, size, gradient)
    dropped = run(reducer, size, gradient, between=_drop_scratch)
    for step, (a, b) in enumerate(zip(kept[0].means, dropped[0].means, strict=True)):
        assert torch.equal(a, b), f"dropping scratch changes step {step}"


def _drop_scratch(state_: State) -> None:
    for key in [k for k in state_ if k.startswith("_")]:
        del state_[key]
    for value in state_.values():
        if isinstance(value, dict):
            _drop_scratch(value)


def check_degenerate(reducer: Reducer, size: int, x: Tensor) -> None:
    """Nothing raises, nothing becomes non-finite, the law holds."""
    bucket = Bucket.flat(x.numel())

    def gradient(rank: int, step: int) -> Tensor:
        return x.clone()

    for trace in run(reducer, size, gradient, bucket, steps=2):
        assert all(bool(m.isfinite().all()) for m in trace.means), "finite gradients gave a non-finite mean"
        assert all(bool(h.isfinite().all()) for h in trace.held), "finite gradients gave a non-finite memory"
    check_conservation(reducer, size, gradient, bucket)
    check_replicas_identical(reducer, size, gradient, bucket)


def check_nonfinite(reducer: Reducer, size: int, gradient: Gradient, bad: float, where: int) -> None:
    """One bad value on the last worker: every worker's mean is non-finite, every memory is what it was before."""

    def poisoned(rank: int, step: int) -> Tensor:
        x = gradient(rank, step)
        if step == 1 and rank == size - 1:
            x[where] = bad
        return x

    for rank, trace in enumerate(run(reducer, size, poisoned)):
        assert not bool(trace.means[1].isfinite().all()), (
            f"rank {rank} was given a finite mean of a non-finite gradient"
        )
        assert torch.equal(trace.held[1], trace.held[0]), f"rank {rank}'s memory was changed by a non-finite gradient"
        assert bool(trace.means[2].isfinite().all()), f"rank {rank} did not recover from a non-finite gradient"


def check_rng_untouched(reducer: Reducer, gradient: Gradient) -> None:
    """Nobody's random numbers change because gradients are compressed."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    run(reducer, 2, gradient)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0]), "torch's global generator was used"
    assert before[1] == after[1], "numpy's global generator was used"
    assert before[2] == after[2], "random's global generator was used"


def check_deterministic(reducer: Reducer, size: int, gradient: Gradient) -> None:
    """The same seed and gradients give the same bits."""
    for a, b in zip(run(reducer, size, gradient), run(reducer, size, gradient), strict=True):
        assert all(torch.equal(m, n) for m, n in zip(a.means, b.means, strict=True)), "two runs differ"


def check_state_rules(reducer: Reducer, gradient: Gradient) -> None:
    """Cutting a state by name and joining it again gives it back: it follows the rules of core."""
    trace = run(reducer, 1, gradient)[0]
    plain = state.copy(trace.state)
    fresh = local.run(1, lambda comm: reducer.init(BUCKET, comm))[0]
    state.paste(state.cut(trace.state, BUCKET), fresh, BUCKET)
    assert _same(plain, state.copy(fresh)), "a state that was cut by name and joined again is another state"


def _same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return a == b


def check_codec_leaves_input(compressor: Compressor, x: Tensor) -> None:
    """``encode`` does not change its input, and ``remove`` leaves exactly the rest."""
    bucket = Bucket.flat(x.numel())
    state_ = compressor.init(bucket, 3)
    before = x.clone()
    payload = compressor.encode(x, state_)
    assert torch.equal(x, before), "encode changed its input"
    decoded = inspection.decode(compressor, payload, state_)
    compressor.remove(payload, x, state_)
    if compressor.conserves:
        assert_close(x + decoded, before, 2.0**-22 * float(before.abs().max()) if x.numel() else 0.0, "rest + sent")


def check_hostile_bytes(compressor: Compressor, x: Tensor, cases: int, seed: int) -> None:
    """A mutated body is refused with a ValueError, or decodes to something; never a crash, never a write outside."""
    rng = np.random.default_rng(seed)
    state_ = compressor.init(Bucket.flat(x.numel()), 3)
    payload = compressor.encode(x, state_)
    body = payload.body.clone()
    guard, length = 32, compressor.accumulator(torch.empty_like(x), state_).numel()
    for _ in range(cases):
        mutated = _mutate(body.numpy().copy(), rng)
        big = torch.zeros(length + 2 * guard)
        acc = big[guard : guard + length]
        try:
            compressor.accumulate(type(payload)(torch.from_numpy(mutated), x.numel()), acc)
        except ValueError as error:
            if not str(error):
                raise AssertionError("an error without a message") from error
        outside = torch.cat([big[:guard], big[guard + length :]])
        assert not bool(outside.any()), "memory outside the accumulator was written"


def _mutate(body: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    kind = rng.integers(4)
    if kind == 0:  # truncated
        return body[: rng.integers(len(body) + 1)].copy()
    if kind == 1:  # longer
        return np.concatenate([body, rng.integers(0, 256, rng.integers(1, 40), dtype=np.uint8)])
    if kind == 2:  # noise
        return rng.integers(0, 256, len(body), dtype=np.uint8)
    places = rng.integers(0, max(1, min(len(body), 64 if rng.random() < 0.7 else len(body))), rng.integers(1, 5))
    if len(body):
        body[places] = rng.integers(0, 256, len(places), dtype=np.uint8)
    return body


DEGENERATE = {
    "empty": torch.zeros(0),
    "one element": torch.tensor([-2.5]),
    "one zero": torch.zeros(1),
    "all zero": torch.zeros(1000),
    "constant": torch.full((1000,), 0.25),
    "all negative": -torch.linspace(0.1, 3.0, 1000),
    "one non-zero": torch.nn.functional.one_hot(torch.tensor(613), 1000).float() * -3.0,
    "denormal": torch.linspace(-1, 1, 1000) * 1e-40,
    "huge": torch.linspace(-1, 1, 1000) * 3.4e38 / 4,
    "largest": torch.full((1000,), torch.finfo(torch.float32).max / 8),
    "tiny length": torch.tensor([1e-3, -4.0, 0.0]),
}

NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
