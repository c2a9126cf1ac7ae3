"""Scripts that end without ``close()``: forks pairs of ranks that run to the end of this file, and tells how they end.

``exit_script.py PAIRS BUSY``: so many pairs for each case, beside BUSY busy processes for each core. Every rank ends as
a Python process ends. The thread that looks for alarms does so all the time, so that a rare race is a common one.
"""

import gc
import json
import os
import signal
import sys
import tempfile
import time

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no threads but those of the ranks

import torch
import torch._dynamo  # DDP imports it; here that is done before the ranks are forked
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad.engine import failure_report
from tersegrad.engine.warm import warm
from tersegrad.specs import parse_reducer

CASES = ["topk", "none", "powersgd, destroyed", "topk, destroyed", "topk, busy", "powersgd, busy"]


def train(case: str) -> None:
    spec, _, how = case.partition(", ")
    failure_report._TICK = 0.001
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60))
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    handle = tersegrad.attach(model, spec)
    for _ in range(5):
        model(torch.randn(4, 60)).square().mean().backward()
    if how == "destroyed":
        dist.destroy_process_group()
    if how == "busy" and dist.get_rank() == 0:
        _leave_the_worker_waiting(model, handle)


def _leave_the_worker_waiting(model: DistributedDataParallel, handle: tersegrad.Handle) -> None:
    """The second of two buckets never comes, and the other rank has ended or will."""
    model.module[0].weight.register_hook(_raise)
    try:
        model(torch.randn(4, 60)).square().mean().backward()
    except ArithmeticError:
        return
    raise AssertionError("backward went through")


def _raise(gradient: torch.Tensor) -> None:
    raise ArithmeticError("a hook of the user's own")


# ---- the process that forks ----------------------------------------------------------------------


def spin() -> int:
    """A process that only takes time from the others."""
    pid = os.fork()
    while not pid:
        pass
    return pid


def fork_pair(case: str) -> list[int] | tuple[int, str]:
    """The two processes; in each of them its rank and the store."""
    store = tempfile.mktemp(prefix="tersegrad-exit-")
    pids = []
    for rank in range(2):
        pid = os.fork()
        if not pid:
            return rank, store
        pids.append(pid)
    return pids


def exit_codes(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def become_rank(pairs: int, busy: int) -> tuple[str, int, str] | None:
    """Forks and waits; returns in the forked processes only, and None at the end."""
    found: dict[str, list[int]] = {}
    spinning = [spin() for _ in range(busy * (os.cpu_count() or 1))]
    for case in CASES:
        warm(parse_reducer(case.partition(", ")[0]), 0)
        while len(os.listdir("/proc/self/task")) > 1:  # a lock that another thread holds would be held for ever
            time.sleep(0.001)
        for _ in range(pairs):
            forked = fork_pair(case)
            if isinstance(forked, tuple):
                return case, *forked
            found[case] = found.get(case, []) + exit_codes(forked)
    for pid in spinning:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps(found), flush=True)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    if mine := become_rank(int(sys.argv[1]), int(sys.argv[2])):
        case, rank, store = mine
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        train(case)
