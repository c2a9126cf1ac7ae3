"""Squared gradients of single samples, where a spec needs them."""

import torch

from tersegrad.core import Reducer, needs_of
from tersegrad.per_sample import PerBackward, PerSample, SquaredGradients


def squares_for(spec: Reducer, module: torch.nn.Module) -> SquaredGradients | None:
    """Hooks that gather what the spec needs to know about single samples, if it does."""
    try:
        wanted = needs_of(spec).squares
    except ValueError as error:
        raise ValueError(f"{spec!r}: {error}") from None
    if wanted is None:
        return None
    if wanted == "microbatch":
        return PerBackward(module)
    return PerSample(module, sampled=wanted == "sampled")
