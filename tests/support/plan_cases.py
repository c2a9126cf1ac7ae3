"""What runs inside the gloo worker processes of tests/plan/test_probe.py."""

import torch
import torch.distributed as dist
from torch import nn

from tersegrad.comm.torch import TorchComm
from tersegrad.plan import probe


def profile() -> probe.Profile:
    torch.manual_seed(0)
    net = nn.Linear(64, 64)
    group = dist.new_group()
    try:
        return probe.measure(
            TorchComm(group), ["none", "topk"], net, lambda: net(torch.ones(4, 64)).square().mean(), sizes=(100, 5000)
        )
    finally:
        dist.destroy_process_group(group)
