"""Reducers: how N workers compute one mean, one file each."""

from tersegrad.reducers.allgather import AllGather
from tersegrad.reducers.allreduce import AllReduce
from tersegrad.reducers.dense import Dense
from tersegrad.reducers.gradiveq import GradiVeQ
from tersegrad.reducers.powersgd import PowerSGD
from tersegrad.reducers.ring import Ring
from tersegrad.reducers.signsgd import SignSGD
from tersegrad.reducers.twoshot import TwoShot
from tersegrad.reducers.vgc import VGC

__all__ = ["VGC", "AllGather", "AllReduce", "Dense", "GradiVeQ", "PowerSGD", "Ring", "SignSGD", "TwoShot"]
