"""Ways for N workers to agree on one mean, one file each."""

from tersegrad.reducers.allgather import AllGather
from tersegrad.reducers.allreduce import AllReduce
from tersegrad.reducers.dense import Dense

__all__ = ["AllGather", "AllReduce", "Dense"]
