"""Auto: tries several methods during training, and goes on with the fastest; again when the network changes."""

from tersegrad.auto.reducer import Auto

__all__ = ["Auto"]
