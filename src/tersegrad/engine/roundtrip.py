"""One vector through one codec, in one process: for notebooks, ``tersegrad inspect`` and tests."""

import torch
from torch import Tensor

from tersegrad.comm import frame
from tersegrad.core import Compressor, Layout, Payload, Spec, State, Step, decode_sum
from tersegrad.specs import parse


def compressor_of(spec: str | Spec) -> Compressor:
    """The spec itself, or the compressor inside it.

    Raises:
        ValueError: There is none, or there are several and it is not clear which one is meant.
    """
    parsed = parse(spec)
    if isinstance(parsed, Compressor):
        return parsed
    inner = [s for s in parsed.walk() if isinstance(s, Compressor)]
    nested = {id(part) for s in inner for part in s.walk() if part is not s}
    found = [s for s in inner if id(s) not in nested]
    if not found:
        raise ValueError(f"{parsed!r} has no compressor in it that could run by itself. Try AllReduce(BF16()).")
    if len(found) > 1:
        raise ValueError(
            f"{parsed!r} has {len(found)} compressors in it: {', '.join(map(repr, found))}. Write one of them."
        )
    return found[0]


def roundtrip(spec: str | Spec, x: Tensor, seed: int = 0) -> tuple[Tensor, Payload]:
    """What all workers see of a vector, and the payload that carries it.

    Args:
        spec: A compressor, or a spec with one inside.
        x: Any shape and float dtype.
        seed: Of the compressor's randomness.

    Returns:
        The decoded tensor in the shape of ``x``, and the payload; ``payload.nbytes`` is what travels.

    >>> decoded, payload = roundtrip("TopK(ratio=0.25)", torch.tensor([0.1, -3.0, 0.2, 0.5]))
    >>> decoded
    tensor([ 0., -3.,  0.,  0.])
    """
    compressor = compressor_of(spec)
    flat = x.detach().to(torch.float32).reshape(-1).contiguous()
    layout = Layout(("x",), (tuple(x.shape),), seed, x.device)
    state = compressor.init(layout, seed)
    payload = compressor.encode(flat, state)
    frame.seal(payload, compressor.fingerprint(), Step(layout))
    return decode(compressor, payload, state).reshape(x.shape), payload


def decode(compressor: Compressor, payload: Payload, state: State) -> Tensor:
    """The vector that a payload stands for."""
    decoded = torch.empty(payload.numel, device=payload.body.device)
    decode_sum(compressor, [payload], 1.0, decoded, state)
    return decoded
