"""The old name of ``tersegrad.hosts.distributed_checkpoint``; it goes with the next release."""

import warnings

from tersegrad.hosts.distributed_checkpoint import Shards

__all__ = ["Shards"]

warnings.warn("tersegrad.dcp is now tersegrad.hosts.distributed_checkpoint.", FutureWarning, stacklevel=2)
