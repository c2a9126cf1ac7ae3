"""Where gradients come from: DistributedDataParallel."""

from tersegrad.hosts.ddp import attach
from tersegrad.hosts.handle import Handle

__all__ = ["Handle", "attach"]
