"""Sums of whole vectors."""

from torch import Tensor

__all__ = ["check_add"]


def check_add(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Raise ValueError unless all vectors have the same length."""
    if not a.numel() == b.numel() == out.numel():
        raise ValueError(f"a, b and out must have the same length, got {a.numel()}, {b.numel()} and {out.numel()}")
