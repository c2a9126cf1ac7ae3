"""Network: N hosts on one machine, joined by a switch, with links that the kernel really makes slow.

    with Network(4, "100Mbit") as network:
        workers = [subprocess.Popen(network.command(rank, [sys.executable, "train.py"])) for rank in range(4)]

A host is a network namespace with one interface; the switch is a bridge in a namespace of its own; between them is a
veth pair, and ``tc`` shapes what leaves either end of it. Nothing appears among the machine's own interfaces.

Every namespace has a keeper: a process that sleeps in it. The kernel removes a namespace together with its links when
nobody is inside any more, so the end of the keepers is the end of the network. A keeper waits for the word of its
owner, or for the owner's death, ends what was started in its namespace, and goes. That is why there is nothing to
clean up after a crash, not even after SIGKILL.

Root can do all of this. Anybody else can where the kernel allows user namespaces: the keepers then live in one, and
``command`` enters it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from types import TracebackType
from typing import Self

from tersegrad.units import parse_rate, parse_time

MAX_HOSTS = 64
_INTERFACE = "lab0"  # not eth0: a worker that was started outside by mistake must not find an interface of this name
_SUBNET = "198.18.0"  # RFC 2544 keeps these addresses for laboratories: no route leads there
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}  # on Debian
_INSTEAD = "An emulated link needs no permission: Throttled"
_PATIENCE = 10.0  # seconds for a keeper to come or go; each needs a few hundredths

_KEEPER = """
import contextlib, os, select, signal, time

def inside():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            if int(pid) != os.getpid() and os.readlink(f"/proc/{pid}/ns/net") == home:
                yield int(pid)

home, owner = os.readlink("/proc/self/ns/net"), os.getppid()
print("ready", flush=True)
while os.getppid() == owner and not select.select([0], [], [], 1.0)[0]:
    pass
for signum in (signal.SIGTERM, signal.SIGKILL):
    for pid in inside():
        with contextlib.suppress(OSError):
            os.kill(pid, signum)
    deadline = time.monotonic() + 2.0
    while any(inside()) and time.monotonic() < deadline:
        time.sleep(0.02)
"""


class Network:
    """Hosts 0 to N-1 on one switch. Use it in a ``with``, or call ``up`` and ``down``; both may be repeated."""

    def __init__(self, hosts: int, bandwidth: str | None = None, *, latency: str | None = None, loss: float = 0.0):
        """``bandwidth`` is that of each host's link in each direction (None: as fast as the machine copies)."""
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"Network of {hosts} hosts: one machine carries 1 to {MAX_HOSTS}.")
        self.hosts = hosts
        self.rate = parse_rate(bandwidth) if bandwidth else None  # bytes a second
        self.delay = parse_time(latency) if latency else 0.0
        self.loss = loss
        self._keepers: list[_Keeper] = []  # that of each host, then that of the switch

    def up(self) -> None:
        self._switch = _Keeper("s")
        self._keepers = [_Keeper(str(i), self._switch) for i in range(self.hosts)]
        self._switch.run("ip", "link add br0 type bridge mcast_snooping 0", "link set br0 addrgenmode none up")
        for i, k in enumerate(self._keepers):
            self._switch.run("ip", f"link add p{i} type veth peer name {_INTERFACE} netns {k.pid}", f"link set p{i} master br0 addrgenmode none", f"link set p{i} up")
            k.run("ip", "link set lo up", f"link set {_INTERFACE} addrgenmode none", f"addr add {_SUBNET}.{i+1}/24 dev {_INTERFACE}", f"link set {_INTERFACE} up", *EXTRA)
            if EXTRA: self._switch.run("ip", *[e.replace(_INTERFACE, f"p{i}") for e in EXTRA if "gso" in e])
            if self.rate:
                k.run("tc", f"qdisc add dev {_INTERFACE} root tbf rate {self.rate*8:.0f}bit burst {BURST(self.rate)} limit {LIMIT(self.rate)}")
                self._switch.run("tc", f"qdisc add dev p{i} root tbf rate {self.rate*8:.0f}bit burst {BURST(self.rate)} limit {LIMIT(self.rate)}")

    def down(self):
        for k in self._keepers+[self._switch]: k.end()

EXTRA = []
BURST = lambda r: int(max(6000, r/1000))
LIMIT = lambda r: int(max(262144, r*.02))

def _tool(n):
    return shutil.which(n) or shutil.which(n, path="/usr/sbin:/sbin")

class _Keeper:
    def __init__(self, label, switch=None):
        root = os.geteuid() == 0
        self.user = [] if root else ["--user", "--preserve-credentials"]
        if switch is None:
            cmd = [_tool("unshare"), *([] if root else ["--user", "--map-root-user"]), "--net", "--"]
        else:
            cmd = [] if root else [_tool("nsenter"), "--target", str(switch.pid), *self.user, "--"]
            cmd += [_tool("unshare"), "--net", "--"]
        self.p = subprocess.Popen([*cmd, sys.executable, "-I", "-S", "-c", _KEEPER, label], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.p.stdout.readline() == "ready\n"
        self.pid = self.p.pid
    def command(self, argv):
        return [_tool("nsenter"), "--target", str(self.pid), *self.user, "--net", "--", *argv]
    def run(self, tool, *lines):
        r = subprocess.run(self.command([_tool(tool), "-batch", "-"]), input="\n".join(lines), text=True, capture_output=True)
        if r.returncode: raise RuntimeError(r.stderr, lines)
    def end(self):
        self.p.communicate("x")
