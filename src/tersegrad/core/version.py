"""The version of the package; ranks compare it at attach."""

__version__ = "0.2.0"
