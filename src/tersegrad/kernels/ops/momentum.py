"""Momentum that is accumulated before sending."""

from torch import Tensor

__all__ = ["SENT", "check_lengths"]

SENT = 2.0**-20  # share of a total: a smaller change of an element is rounding, a larger one means that it was sent


def check_lengths(*vectors: Tensor) -> None:
    """Raise ValueError unless all vectors have the same number of elements."""
    lengths = [vector.numel() for vector in vectors]
    if len(set(lengths)) > 1:
        raise ValueError(f"gradient, velocity and residual must have the same length, got {lengths}")
