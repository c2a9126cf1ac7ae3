"""What runs in the processes of test_faults.py: a small training on four ranks in which something goes wrong.

As a script it reads cases from standard input, one line of JSON each, and answers each with one. For a case it forks
four ranks (so that torch is imported once); these run to the end of this script, and end as every Python process ends.
Every rank says "ready" on a pipe after three good steps, and the victim waits for a word on another before the fault,
so that everything happens at a known moment.
"""

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP imports it; here that is done before the ranks are forked
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tersegrad
from tersegrad.core import Comm, version
from tersegrad.engine.warm import warm
from tersegrad.specs import parse_reducer

TIMEOUT = 5.0
GRACE = 3.0  # instead of failure_report.GRACE, because the tests wait for it
BUSY = 3.0  # seconds that a busy machine may add to what is promised
SIZE = 4
LIMIT = 90.0  # seconds until a case is given up; far above what it needs


class Net(nn.Module):
    """Two layers in two buckets; the victim can be made to fail or hang in forward, or between the buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(60, 60), nn.Linear(60, 60)
        self.trouble: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trouble == "raise":
            raise ValueError("the data loader is out of disk")
        if self.trouble == "lock":
            _wait_for_ever()
        hidden = self.first(x)
        if self.trouble == "raise in backward":
            hidden.register_hook(_raise)
        return self.second(torch.relu(hidden))


def _raise(gradient: torch.Tensor) -> None:
    raise ValueError("a hook of the user's own")


def _wait_for_ever() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


class _Broken(Comm):
    """A Comm that can be made to fail in this process, as a codec or a full disk would, not as the network does."""

    def __init__(self, inner: Comm):
        self.inner, self.rank, self.size, self.broken = inner, inner.rank, inner.size, False
        _comms.append(self)

    def _check(self) -> None:
        if self.broken:
            raise ArithmeticError("the codec divided by zero")

    def start_all_reduce(self, x: Any) -> Any:
        self._check()
        return self.inner.start_all_reduce(x)

    def all_gather(self, x: Any) -> Any:
        self._check()
        return self.inner.all_gather(x)

    def start_shift(self, x: Any, into: Any, by: int = 1) -> Any:
        self._check()
        return self.inner.start_shift(x, into, by)

    def broadcast(self, x: Any, root: int = 0) -> None:
        self._check()
        self.inner.broadcast(x, root)


_comms: list[_Broken] = []


@dataclass
class Case:
    """One run: which rank gets into which trouble."""

    spec: str
    fault: str
    victim: int
    init_method: str
    folder: str  # where the ranks' words go


def train(rank: int, case: Case, ready: int, go: int) -> None:
    torch.manual_seed(0)
    net, spec = Net(), case.spec
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    if rank == case.victim and case.fault == "never attaches":
        raise ValueError("the data loader is out of disk")
    if rank == case.victim and case.fault == "another version":
        version.__version__ = "0.0.1"
    if rank == case.victim and case.fault == "another spec":
        spec = "AllReduce(BF16())"
    # "none" goes straight to the process group, unless something is put in its way
    network = None if spec == "none" and case.fault != "raises in the worker" else _Broken
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = tersegrad.attach(model, spec, timeout=TIMEOUT, network=network, optimizer=optimizer)
    handle._engine._peers._reporter.grace = GRACE
    try:
        for step in range(1000):
            if step == 3:
                os.write(ready, b"r")
                if rank == case.victim and os.read(go, 1):
                    begin(net, case.fault)
            x = torch.randn(4, 60, generator=torch.Generator().manual_seed(1000 * step + rank))
            began = time.monotonic()
            model(x).square().mean().backward()
    except tersegrad.NetworkError:
        print(f"raised after {time.monotonic() - began:.2f} s", file=sys.stderr, flush=True)
        raise
    finally:
        if case.fault != "raises, not closed":
            handle.close()
            left = [t.name for t in threading.enumerate() if t.name.startswith("tersegrad")]
            print("threads left:", left, file=sys.stderr, flush=True)


def begin(net: Net, fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "raises in the worker":
        _comms[0].broken = True
    net.trouble = {
        "raises in forward": "raise",
        "raises, not closed": "raise",
        "raises in backward": "raise in backward",
        "hangs on a lock": "lock",
    }.get(fault)


# ---- the process that forks ----------------------------------------------------------------------


class Rank:
    """One forked process, seen from the one that forked it."""

    def __init__(self, pid: int, ready: int, go: int):
        self.pid, self.ready, self.go = pid, ready, go
        self.status: int | None = None

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def await_ready(self, until: float) -> None:
        if not select.select([self.ready], [], [], max(0.0, until - time.monotonic()))[0]:
            os.kill(self.pid, signal.SIGABRT)  # it writes what it was doing

    def stop(self) -> None:
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.ready)
        os.close(self.go)


def fork(rank: int, case: Case) -> Rank | tuple[int, int]:
    """The process, for the one that forked it; and for the process itself the pipes that it reads and writes."""
    (ready_out, ready_in), (go_out, go_in) = os.pipe(), os.pipe()
    if pid := os.fork():
        os.close(ready_in)
        os.close(go_out)
        return Rank(pid, ready_out, go_in)
    os.close(ready_out)
    os.close(go_in)
    words = os.open(Path(case.folder, f"rank{rank}.txt"), os.O_CREAT | os.O_WRONLY)
    os.dup2(words, 1)
    os.dup2(words, 2)
    faulthandler.enable()
    return ready_in, go_out


def _await_single_thread() -> None:
    """A lock that another thread holds while this process forks is held for ever in the forked one."""
    until = time.monotonic() + LIMIT
    while len(names := os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < until, f"cannot fork: {len(names)} threads are running"
        time.sleep(0.001)


def await_end(ranks: list[Rank], case: Case) -> dict[str, Any]:
    """Lets the fault happen, and waits until all but the victim have ended."""
    if case.fault not in ("never attaches", "another spec", "another version"):
        until = time.monotonic() + LIMIT
        for rank in ranks:
            rank.await_ready(until)
        os.write(ranks[case.victim].go, b"g")
    began = time.monotonic()
    others = [rank for i, rank in enumerate(ranks) if i != case.victim]
    while not all([rank.ended() for rank in others]) and time.monotonic() < began + LIMIT:  # noqa: C419
        time.sleep(0.02)
    took = time.monotonic() - began
    while "raises" in case.fault and not ranks[case.victim].ended() and time.monotonic() < began + LIMIT:
        time.sleep(0.02)
    for rank in ranks:
        rank.stop()
    return {"codes": [rank.status for rank in ranks], "seconds": took}


def become_rank() -> tuple[int, Case, int, int] | None:
    """Serves cases; returns in the forked processes only, and None at the end."""
    for line in sys.stdin:
        case = Case(**json.loads(line))
        warm(parse_reducer(case.spec), 0)  # so that kernels are loaded once
        _await_single_thread()
        ranks = []
        for rank in range(SIZE):
            forked = fork(rank, case)
            if not isinstance(forked, Rank):
                return rank, case, *forked
            ranks.append(forked)
        print(json.dumps(await_end(ranks, case)), flush=True)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # what was imported here is not for the garbage collectors of the ranks
    if mine := become_rank():
        dist.init_process_group("gloo", init_method=mine[1].init_method, rank=mine[0], world_size=SIZE)
        train(*mine)
