"""The laws of compressors (``tersegrad.core``): each function raises AssertionError if one is broken."""

import math

import numpy as np
import torch
from torch import Tensor

from tersegrad.comm import frame
from tersegrad.core import (
    HEADER_NBYTES,
    Compressor,
    Layout,
    Payload,
    Step,
    Transformed,
    accumulate,
    adds_in_place,
    decode_sum,
    sections,
    subtract,
)
from tersegrad.core import state as states
from tersegrad.engine.roundtrip import decode
from tersegrad.testing.inputs import DEGENERATE, GRADIENT
from tersegrad.testing.runs import assert_close

DRAWS = 400  # encodings that an expectation is estimated from
SIGMAS = 6.0  # of the estimate's own error that it may be off: chance alone does that once in 10^9 elements


def check_codec(compressor: Compressor, x: Tensor) -> None:
    """``encode`` leaves its input alone, ``subtract`` leaves exactly the rest, the sections are all that travels."""
    state = compressor.init(Layout.flat(x.numel()), 3)
    before = x.clone()
    payload = compressor.encode(x, state)
    assert torch.equal(x, before), "encode changed its input"
    said, travels = sum(sections(compressor, payload).values()), payload.nbytes - HEADER_NBYTES
    assert said == travels, f"sections of {said} bytes, and {travels} travel"
    decoded = decode(compressor, payload, state)
    subtract(compressor, payload, x, state)
    largest = max((float(t.abs().max()) for t in (before, decoded) if x.numel()), default=0.0)
    assert_close(x + decoded, before, 2.0**-22 * largest, "rest + sent")


def check_payload_is_all(compressor: Compressor, x: Tensor) -> None:
    """What was sent can be decoded by another worker: from the frame's bytes alone."""
    step = Step(Layout.flat(x.numel()))
    state = compressor.init(step.layout, 3)
    payload = compressor.encode(x, state)
    here = decode(compressor, payload, state)
    raw = bytes(frame.seal(payload, compressor.fingerprint(), step).tolist())
    assert len(raw) == payload.nbytes, f"{len(raw)} bytes travel, and {payload.nbytes} are claimed"
    received = frame.open_frame(torch.tensor(list(raw), dtype=torch.uint8), compressor.fingerprint(), step)
    decoded = decode(compressor, received, compressor.init(step.layout, 99))
    assert torch.equal(here, decoded), "the payload alone decodes to something else than the payload with its state"


def check_decode_sum(compressor: Compressor, x: Tensor) -> None:
    """Payloads that are decoded together give what they give one after the other, to the bit, and finite if it is."""
    layout, scale, payloads = Layout.flat(x.numel()), 1.0 / 3.0, []
    for seed, vector in enumerate((x, -0.5 * x.flip(0), x.roll(1))):
        encoded = compressor.encode(vector, compressor.init(layout, seed))
        payloads.append(Payload(encoded.body.clone(), encoded.numel, encoded.meta, encoded.finite))
    together, one_by_one = torch.full((2, x.numel()), 77.0)
    finite = decode_sum(compressor, payloads, scale, together, compressor.init(layout, 0))
    _decode_one_by_one(compressor, payloads, scale, one_by_one)
    assert torch.equal(together.view(torch.int32), one_by_one.view(torch.int32)), (
        "payloads decoded together have another sum than one after the other"
    )
    really = bool(together.isfinite().all())
    assert finite in (None, really), f"it says of a sum that it is finite: {finite}; and it is: {really}"


def _decode_one_by_one(compressor: Compressor, payloads: list[Payload], scale: float, out: Tensor) -> None:
    """By nothing but ``decode_add``, where payloads may be added straight to a vector."""
    state = compressor.init(Layout.flat(out.numel()), 0)
    if not adds_in_place(compressor) and not isinstance(compressor, Transformed):
        decode_sum(compressor, payloads, scale, out, state)  # PerTensor of another domain: there is no other way
        return
    length = compressor.domain(out.numel()) if isinstance(compressor, Transformed) else out.numel()
    acc = torch.zeros(length)
    for payload in payloads:
        accumulate(compressor, payload, acc, scale)
    if isinstance(compressor, Transformed):
        compressor.inverse(acc, out, state)
    else:
        out.copy_(acc)


def check_error(compressor: Compressor, x: Tensor) -> None:
    """No element is off by more than the share of the largest magnitude that the compressor states."""
    error = compressor.traits().error
    if error is not None and x.numel():
        state = compressor.init(Layout.flat(x.numel()), 3)
        decoded = decode(compressor, compressor.encode(x, state), state)
        assert_close(decoded, x, (error + 2.0**-22) * float(x.abs().max()) + 2.0**-126, "the stated error")


def check_unbiased(compressor: Compressor, x: Tensor, draws: int = DRAWS) -> None:
    """The mean over draws is x, to six standard errors: for compressors that say so."""
    state = compressor.init(Layout.flat(x.numel()), 5)
    total, squared = torch.zeros(2, x.numel(), dtype=torch.float64)
    for _ in range(draws):
        error = decode(compressor, compressor.encode(x, state), state).double() - x.double()
        states.commit(state)
        total += error
        squared += error.square()
    mean = total / draws
    spread = (squared / draws - mean.square()).clamp_min(0.0).sqrt() / math.sqrt(draws)
    # An element that is rounded up once in a thousand draws may not be seen to be: allow for one such draw.
    rare = squared.sqrt() / math.sqrt(draws) / draws + float(x.abs().max()) * 8 / draws
    allowed = SIGMAS * spread + rare + 2.0**-20 * x.abs()
    worst = int((mean.abs() - allowed).argmax())
    assert bool((mean.abs() <= allowed).all()), (
        f"unbiased, it says; but the mean over {draws} draws of element {worst}, {float(x[worst]):.4g}, "
        f"is off by {float(mean[worst]):.4g} +- {float(spread[worst]):.2g}"
    )


def check_contracts(compressor: Compressor, x: Tensor) -> None:
    """|x - decoded| <= |x|: what error feedback needs, for compressors that say so."""
    state = compressor.init(Layout.flat(x.numel()), 3)
    decoded = decode(compressor, compressor.encode(x, state), state)
    rest, whole = float((x.double() - decoded.double()).norm()), float(x.double().norm())
    assert rest <= whole * (1 + 2.0**-20), f"the rest is longer ({rest:.4g}) than what was to be sent ({whole:.4g})"


def check_wrong_length(compressor: Compressor) -> None:
    """A payload for another length is refused."""
    x = torch.linspace(-1, 1, 100)
    payload = compressor.encode(x, compressor.init(Layout.flat(100), 0))
    said = ""
    try:
        decode_sum(compressor, [payload], 1.0, torch.zeros(101), compressor.init(Layout.flat(101), 0))
    except ValueError as error:
        said = str(error)
    assert "101" in said or "100" in said, f"a payload of 100 elements is refused by 101, with both; it said {said!r}"


def check_hostile_bytes(compressor: Compressor, x: Tensor, cases: int = 300, seed: int = 11) -> None:
    """Mutated payloads are refused with a ValueError, or decode to something; never a crash or a write outside."""
    rng = np.random.default_rng(seed)
    state = compressor.init(Layout.flat(x.numel()), 3)
    payload = compressor.encode(x, state)
    good = Payload(payload.body.clone(), payload.numel, payload.meta, payload.finite)
    guard = 32
    for case in range(cases):
        big = torch.zeros(x.numel() + 2 * guard)
        payloads = [hostile(good, rng)] if case % 2 else [good, hostile(good, rng)]
        try:
            decode_sum(compressor, payloads, 0.5, big[guard : guard + x.numel()], state)
        except ValueError as error:
            if not str(error):
                raise AssertionError("an error without a message") from error
        outside = torch.cat([big[:guard], big[guard + x.numel() :]])
        assert not bool(outside.any()), "memory outside the accumulator was written"


def hostile(payload: Payload, rng: np.random.Generator) -> Payload:
    """A payload whose meta, body or both were mutated."""
    meta, body = payload.meta, payload.body
    which = rng.integers(3)
    if which != 0 and meta:
        meta = mutate(np.frombuffer(meta, np.uint8).copy(), rng).tobytes()
    if which != 1 or not meta:
        mutated = mutate(body.numpy().copy(), rng)
        body = torch.empty(len(mutated), dtype=torch.uint8).copy_(torch.from_numpy(mutated))
    return Payload(body, payload.numel, meta)


def mutate(body: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Some bytes that began as a valid body: cut, longer, noise, or with a few bytes changed."""
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


def check_compressor(compressor: Compressor) -> None:
    """All laws of compressors."""
    x, traits = GRADIENT(0, 0), compressor.traits()
    for vector in (x, *DEGENERATE.values()):
        check_codec(compressor, vector.clone())
        check_payload_is_all(compressor, vector)
        check_decode_sum(compressor, vector)
        check_error(compressor, vector)
        if traits.contracts:
            check_contracts(compressor, vector)
    if traits.unbiased:
        check_unbiased(compressor, x)
    check_wrong_length(compressor)
    check_hostile_bytes(compressor, x)
