"""Auto: tries several methods during training and keeps the fastest; tries again when the network changes."""

from tersegrad.auto.reducer import Auto

__all__ = ["Auto"]
