"""Hosts: what hands gradients to the engine. DistributedDataParallel, or virtual workers in one process."""

from tersegrad.hosts.ddp import attach
from tersegrad.hosts.handle import Handle
from tersegrad.hosts.simulate import Simulation
from tersegrad.hosts.training import Training

__all__ = ["Handle", "Simulation", "Training", "attach"]
