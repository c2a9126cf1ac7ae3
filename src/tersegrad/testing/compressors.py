"""The laws of compressors (``tersegrad.core``): each function raises AssertionError if one is broken."""

import math

import numpy as np
import torch
from torch import Tensor

from tersegrad import inspection, wire
from tersegrad import state as states
from tersegrad.core import Bucket, Compressor, Payload
from tersegrad.testing.inputs import DEGENERATE, GRADIENT
from tersegrad.testing.runs import assert_close

DRAWS = 400  # encodings that an expectation is estimated from
SIGMAS = 6.0  # of the estimate's own error that it may be off: chance alone does that once in 10^9 elements


def check_codec(compressor: Compressor, x: Tensor) -> None:
    """``encode`` leaves its input alone, ``remove`` leaves exactly the rest, and the sections are all of the body."""
    state = compressor.init(Bucket.flat(x.numel()), 3)
    before = x.clone()
    payload = compressor.encode(x, state)
    assert torch.equal(x, before), "encode changed its input"
    sections = sum(compressor.sections(payload).values())
    assert sections == payload.body.numel(), f"sections of {sections} bytes, and the body has {payload.body.numel()}"
    decoded = inspection.decode(compressor, payload, state)
    compressor.remove(payload, x, state)
    if compressor.conserves:
        largest = max((float(t.abs().max()) for t in (before, decoded) if x.numel()), default=0.0)
        assert_close(x + decoded, before, 2.0**-22 * largest, "rest + sent")


def check_payload_is_all(compressor: Compressor, x: Tensor) -> None:
    """What was sent can be decoded by another worker: from the frame's bytes alone."""
    bucket = Bucket.flat(x.numel())
    state = compressor.init(bucket, 3)
    payload = compressor.encode(x, state)
    here = inspection.decode(compressor, payload, state)
    frame = bytes(wire.seal(payload, compressor.fingerprint(), bucket).tolist())
    assert len(frame) == payload.nbytes, f"{len(frame)} bytes travel, and {payload.nbytes} are claimed"
    body = torch.tensor(list(frame[len(frame) - payload.body.numel() :]), dtype=torch.uint8)
    received = Payload(body, payload.numel, payload.finite)
    decoded = inspection.decode(compressor, received, compressor.init(bucket, 99))
    assert torch.equal(here, decoded), "the payload alone decodes to something else than the payload with its state"


def check_sum_decoded(compressor: Compressor, x: Tensor) -> None:
    """Payloads that are decoded together give what they give one after the other, to the bit, and finite if it is."""
    bucket, scale, payloads = Bucket.flat(x.numel()), 1.0 / 3.0, []
    for seed, vector in enumerate((x, -0.5 * x.flip(0), x.roll(1))):
        encoded = compressor.encode(vector, compressor.init(bucket, seed))
        payloads.append(Payload(encoded.body.clone(), encoded.numel, encoded.finite))
    together, one_by_one = torch.full((2, x.numel()), 77.0)
    finite = compressor.sum_decoded(payloads, scale, together, compressor.init(bucket, 0))
    state = compressor.init(bucket, 0)
    acc = compressor.accumulator(one_by_one, state)
    for payload in payloads:
        compressor.accumulate(payload, acc, scale)
    compressor.finish(acc, one_by_one, state)
    assert torch.equal(together.view(torch.int32), one_by_one.view(torch.int32)), (
        "payloads decoded together have another sum than one after the other"
    )
    really = bool(together.isfinite().all())
    assert finite in (None, really), f"it says of a sum that it is finite: {finite}; and it is: {really}"


def check_unbiased(compressor: Compressor, x: Tensor, draws: int = DRAWS) -> None:
    """The mean over draws is x, to six standard errors: for compressors that say so."""
    state = compressor.init(Bucket.flat(x.numel()), 5)
    total, squared = torch.zeros(2, x.numel(), dtype=torch.float64)
    for _ in range(draws):
        error = inspection.decode(compressor, compressor.encode(x, state), state).double() - x.double()
        states.settle(state, keep=True)
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
    state = compressor.init(Bucket.flat(x.numel()), 3)
    decoded = inspection.decode(compressor, compressor.encode(x, state), state)
    rest, whole = float((x.double() - decoded.double()).norm()), float(x.double().norm())
    assert rest <= whole * (1 + 2.0**-20), f"the rest is longer ({rest:.4g}) than what was to be sent ({whole:.4g})"


def check_wrong_length(compressor: Compressor) -> None:
    """A payload for another length is refused."""
    x = torch.linspace(-1, 1, 100)
    payload = compressor.encode(x, compressor.init(Bucket.flat(100), 0))
    said = ""
    try:
        compressor.accumulate(Payload(payload.body, 100), torch.zeros(101))
    except ValueError as error:
        said = str(error)
    assert "101" in said or "100" in said, f"a payload of 100 elements is refused by 101, with both; it said {said!r}"


def check_hostile_bytes(compressor: Compressor, x: Tensor, cases: int = 300, seed: int = 11) -> None:
    """A mutated body is refused with a ValueError, or decodes to something; never a crash, never a write outside."""
    rng = np.random.default_rng(seed)
    state = compressor.init(Bucket.flat(x.numel()), 3)
    payload = compressor.encode(x, state)
    body = payload.body.clone()
    guard, length = 32, compressor.accumulator(torch.empty_like(x), state).numel()
    for case in range(cases):
        mutated = mutate(body.numpy().copy(), rng)
        big = torch.zeros(max(length, x.numel()) + 2 * guard)
        hostile = Payload(torch.from_numpy(mutated), x.numel())
        try:
            if case % 2:
                compressor.accumulate(hostile, big[guard : guard + length])
            else:
                together = [Payload(body, x.numel(), payload.finite), hostile]
                compressor.sum_decoded(together, 0.5, big[guard : guard + x.numel()], state)
        except ValueError as error:
            if not str(error):
                raise AssertionError("an error without a message") from error
        outside = torch.cat([big[:guard], big[guard + max(length, x.numel()) :]])
        assert not bool(outside.any()), "memory outside the accumulator was written"


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
    x = GRADIENT(0, 0)
    for vector in (x, *DEGENERATE.values()):
        check_codec(compressor, vector.clone())
        check_payload_is_all(compressor, vector)
        check_sum_decoded(compressor, vector)
        if compressor.contracts:
            check_contracts(compressor, vector)
    if compressor.unbiased:
        check_unbiased(compressor, x)
    check_wrong_length(compressor)
    check_hostile_bytes(compressor, x)
