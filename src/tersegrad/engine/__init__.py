"""One training step over many buckets, for any host: pipeline, worker, bucket store, commit and roll back."""

from tersegrad.engine.engine import Engine
from tersegrad.engine.gradient import Done, Gradient
from tersegrad.engine.options import NONFINITE, Options
from tersegrad.engine.peers import Peers, Processes

__all__ = ["NONFINITE", "Done", "Engine", "Gradient", "Options", "Peers", "Processes"]
