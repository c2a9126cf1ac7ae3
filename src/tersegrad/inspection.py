"""One vector through one codec, in one process: for notebooks, ``tersegrad inspect`` and tests."""

import torch
from torch import Tensor

from tersegrad import wire
from tersegrad.core import Bucket, Compressor, Payload, Spec, State
from tersegrad.spec import parse


def compressor_of(spec: str | Spec) -> Compressor:
    """The spec itself, or the one compressor inside it."""
    parsed = parse(spec)
    found = [inner for inner in parsed.walk() if isinstance(inner, Compressor)]
    if not found:
        raise ValueError(f"{parsed!r} has no compressor in it that could run by itself. Try AllReduce(BF16()).")
    return found[0]


def roundtrip(spec: str | Spec, x: Tensor, seed: int = 0) -> tuple[Tensor, Payload]:
    """What all workers see of ``x``, and the payload that carries it.

    >>> decoded, payload = roundtrip("TopK(ratio=0.25)", torch.tensor([0.1, -3.0, 0.2, 0.5]))
    >>> decoded
    tensor([ 0., -3.,  0.,  0.])
    """
    compressor = compressor_of(spec)
    flat = x.detach().to(torch.float32).reshape(-1).contiguous()
    bucket = Bucket(("x",), (tuple(x.shape),), seed=seed)
    state = compressor.init(bucket, seed)
    payload = compressor.encode(flat, state)
    wire.seal(payload, compressor.fingerprint(), bucket)
    return decode(compressor, payload, state).reshape(x.shape), payload


def decode(compressor: Compressor, payload: Payload, state: State) -> Tensor:
    """The vector that a payload stands for."""
    decoded = torch.empty(payload.numel)
    acc = compressor.accumulator(decoded, state)
    compressor.accumulate(payload, acc)
    compressor.finish(acc, decoded, state)
    return decoded
