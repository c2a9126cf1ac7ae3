"""Momentum that is accumulated before sending."""

from torch import Tensor

__all__ = ["SENT", "check_lengths"]

SENT = 2.0**-20  # of a total: a reducer that took less has only rounded


def check_lengths(*vectors: Tensor) -> None:
    """Raise ValueError unless all vectors have the same number of elements."""
    lengths = [vector.numel() for vector in vectors]
    if len(set(lengths)) > 1:
        raise ValueError(f"gradient, velocity and residual have the same length, and here are {lengths}")
