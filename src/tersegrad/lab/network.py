"""Network: N hosts on one machine, joined by a switch, over links whose bandwidth the kernel limits.

    with Network(4, "100Mbit") as network:
        workers = [subprocess.Popen(network.command(rank, [sys.executable, "train.py"])) for rank in range(4)]

A host is a network namespace with one interface. The switch is a bridge in a namespace of its own. A veth pair joins
them, and ``tc`` shapes what leaves either end of it. Nothing appears among the machine's own interfaces.

Every namespace has a keeper: a process that sleeps in it. The kernel removes a namespace and its links when nobody is
inside any more, so the network lives as long as its keepers. A keeper waits until its owner dismisses it or dies, ends
what ``command`` started in its namespace, and exits. So a crash, even SIGKILL, leaves nothing behind.

Root may do all this, and other users may where the kernel allows user namespaces: the keepers then run in one, and
``command`` enters it. ``permitted`` says whether it works here.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

from tersegrad.comm.units import parse_rate, parse_time

MAX_HOSTS = 64
_MIN_RATE = 1000.0  # bytes a second
_INTERFACE = "lab0"  # not eth0: a worker started outside by mistake must not find an interface of this name
_SUBNET = "198.18.0"  # RFC 2544 keeps these addresses for laboratories: nothing real answers there
_PATIENCE = 10.0  # seconds until a keeper counts as stuck; it needs some 10 ms, or 4 s if workers do not end
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}

_KEEPER = """
import contextlib, os, select, signal, time

def inside():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
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


@cache
def permitted() -> str | None:
    """None where a Network can be made, else the reason. Finds out by making one, once per process."""
    network = Network(1, "100Mbit")
    try:
        network._build()
    except _RefusalError as refusal:
        return str(refusal)
    finally:
        network.down()
    return None


@cache
def latency_supported() -> bool:
    """Whether a Network can also delay and lose packets: not every kernel has netem. Tries it, once per process."""
    if permitted() is not None:
        return False
    with Network(1) as network:
        try:
            network._at(0).configure("tc", [f"qdisc add dev {_INTERFACE} root netem delay 1ms"])
        except _RefusalError:
            return False
    return True


class Network:
    """Hosts 0 to N-1 on one switch. A ``with`` calls ``up`` and ``down``; both may be called again and again."""

    def __init__(
        self,
        hosts: int,
        bandwidth: str | None = None,  # of each host's link, in each direction; None: as fast as the machine can copy
        *,
        latency: str = "0s",  # one way, from host to host; needs netem
        loss: float = 0.0,  # share of the packets that a host sends and nobody receives; needs netem
    ):
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"Network({hosts}): one machine carries 1 to {MAX_HOSTS} hosts. Ask for that many.")
        rate = parse_rate(bandwidth) if bandwidth else None
        if rate is not None and rate < _MIN_RATE:
            raise ValueError(f"Network(bandwidth={bandwidth!r}): a full frame would take seconds. Write 8kbit or more.")
        if not 0 <= loss < 1:
            raise ValueError(f"Network(loss={loss}): loss is a share of the packets. Write 0.01 for one in a hundred.")
        self.hosts = hosts
        self.bandwidth = bandwidth
        self._link = _Link(rate, parse_time(latency), loss)
        self._keepers: list[_Keeper] = []  # the switch's, then each host's
        self._owner = 0
        if self._link.needs_netem and not latency_supported():
            why = permitted() or "this kernel has no netem (CONFIG_NET_SCH_NETEM)."
            raise ValueError(
                f"Network(latency={latency!r}, loss={loss}): packets cannot be delayed or lost here: {why} "
                f"Latency can be emulated: Throttled({bandwidth!r}, latency={latency!r}). Loss cannot."
            )

    def up(self) -> None:
        """Makes the network, unless it is up."""
        if self._keepers:
            return
        try:
            self._build()
        except _RefusalError as refusal:
            self.down()
            raise RuntimeError(
                f"Network({self.hosts}, {self.bandwidth!r}) cannot be made here: {refusal} "
                f"Throttled({self.bandwidth!r}) emulates such a link without permission."
            ) from None
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Removes the network; what ``command`` started and still runs gets SIGTERM and, 2 seconds later, SIGKILL."""
        if os.getpid() != self._owner:  # a fork of the owner: the network is not its to remove
            return
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.dismiss()
        for keeper in keepers:
            keeper.join()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *exception: object) -> None:
        self.down()

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` on host ``rank``, under the process id that it is started with."""
        return self._at(rank).command(argv)

    def address(self, rank: int) -> str:
        """The IPv4 address of a host, valid inside the network only."""
        self._check(rank)
        return f"{_SUBNET}.{rank + 1}"

    def interface(self, rank: int) -> str:
        """The name of a host's interface, for GLOO_SOCKET_IFNAME."""
        self._check(rank)
        return _INTERFACE

    def sent_bytes(self, rank: int) -> int:
        """What left the host since ``up``, as the kernel counts it.

        Frames with their headers, but a batch of segments that the sender hands over as one frame (see ``_Link``)
        counts one header: framing adds 0.1 % (1Gbit) to 4.6 % (10Mbit) to a long transfer, and acknowledgements up
        to 2.3 % of what was received.
        """
        return self._at(rank).counter(8)

    def received_bytes(self, rank: int) -> int:
        """What arrived at the host since ``up``; see ``sent_bytes``."""
        return self._at(rank).counter(0)

    def _build(self) -> None:
        self._owner = os.getpid()
        switch = _Keeper(f"tersegrad-network-{self._owner}-switch")
        self._keepers.append(switch)
        switch.ready()
        for rank in range(self.hosts):
            self._keepers.append(_Keeper(f"tersegrad-network-{self._owner}-host{rank}", switch))
        lines = ["link add switch type bridge mcast_snooping 0", "link set switch addrgenmode none up"]
        for rank in range(self.hosts):
            host = self._at(rank)
            host.ready()
            lines += [
                f"link add port{rank} type veth peer name {_INTERFACE} netns {host.pid}",
                f"link set port{rank} master switch addrgenmode none up",
            ]
        switch.configure("ip", lines)
        for rank in range(self.hosts):
            self._at(rank).configure("ip", self._host_lines(rank))
            self._at(rank).configure("tc", self._link.shape(_INTERFACE) + self._link.impair(_INTERFACE))
        switch.configure("tc", [line for rank in range(self.hosts) for line in self._link.shape(f"port{rank}")])

    def _host_lines(self, rank: int) -> list[str]:
        lines = [
            "link set lo up",
            f"link set {_INTERFACE} addrgenmode none {self._link.batch()} up",
            f"addr add {self.address(rank)}/24 dev {_INTERFACE}",
        ]
        if "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
            # What nearly every Linux uses, so that results compare. Where the machine's own default was bbr, an
            # all_to_all of 4 hosts at 1Gbit took 4.5 s instead of 1.1 s.
            lines.append(
                f"route replace {_SUBNET}.0/24 dev {_INTERFACE} proto kernel scope link src {self.address(rank)} "
                "congctl cubic"
            )
        return lines

    def _at(self, rank: int) -> "_Keeper":
        self._check(rank)
        if not self._keepers:
            raise RuntimeError("The network is down. Write `with Network(...) as network:`, or call up() first.")
        return self._keepers[1 + rank]

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.hosts:
            raise ValueError(f"Host {rank}: this network has hosts 0 to {self.hosts - 1}.")


class _Link:
    """What ``tc`` is told about one link."""

    # The token bucket is what may be sent at full speed after a pause: one of 1 ms lets 100 kB pass at 1Gbit in 0.3 ms
    # instead of 0.8. It also makes up for timers that fire late: one of 0.2 ms gives 86 Mbit/s of 100 while all cores
    # compute. So: 0.6 ms.
    #
    # The sender's kernel hands over batches of segments as one frame (GSO). tbf splits a frame larger than its bucket,
    # which takes so much time that 1Gbit is not reached; therefore batches are kept smaller than the bucket.
    #
    # Measured with one TCP stream on two cores with five other busy processes, in Mbit/s of payload, median (best);
    # headers leave 95.6 % of a rate for it: 10Mbit 9.6 (9.6), 100Mbit 92 (97), 300Mbit 275 (286), 1Gbit 919 (955).
    # Without a bandwidth, 5 to 13 Gbit/s.
    _BUCKET_SECONDS = 0.0006
    _BUCKET_MIN = 3100  # two full frames
    _QUEUE_SECONDS = 0.02
    _QUEUE_MIN = 256 * 1024  # as in a small switch
    _FRAME = 1500

    def __init__(self, rate: float | None, delay: float, loss: float):
        self.rate = rate  # bytes a second
        self.delay = delay
        self.loss = loss
        self.needs_netem = delay > 0 or loss > 0

    def batch(self) -> str:
        """The argument of ``ip link set`` that limits a batch of segments."""
        if self.rate is None:
            return ""
        return f"gso_max_size {min(65536, int(0.9 * self._bucket(self.rate)))}"  # 0.9: the headers that tbf adds

    def shape(self, device: str) -> list[str]:
        """Lines of ``tc`` that limit the bandwidth."""
        if self.rate is None:
            return []
        queue = max(self._QUEUE_MIN, int(self.rate * self._QUEUE_SECONDS))
        return [
            f"qdisc add dev {device} root handle 1: tbf "
            f"rate {8 * self.rate:.0f}bit burst {self._bucket(self.rate)} limit {queue}"
        ]

    def impair(self, device: str) -> list[str]:
        """Lines of ``tc`` that delay and drop packets, after the bandwidth was limited."""
        if not self.needs_netem:
            return []
        flying = int((self.rate or 1e9) * self.delay / self._FRAME)
        parent = "root" if self.rate is None else "parent 1:1"
        return [
            f"qdisc add dev {device} {parent} netem "
            f"delay {1e6 * self.delay:.0f}us loss {100 * self.loss:.6f}% limit {1000 + 2 * flying}"
        ]

    def _bucket(self, rate: float) -> int:
        return max(self._BUCKET_MIN, int(rate * self._BUCKET_SECONDS))


class _Keeper:
    """A network namespace and the process that keeps it."""

    def __init__(self, name: str, inside: "_Keeper | None" = None):
        """``inside``: the keeper whose user namespace it enters, if there is one. ``name`` is what ``ps`` shows."""
        self._enter_user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        make_user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        if inside is None:
            prefix = [_tool("unshare"), *make_user, "--net", "--"]
        else:
            prefix = inside.command([_tool("unshare"), "--net", "--"])
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-S", "-c", _KEEPER, name],
            stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True,  # Ctrl-C is for the owner
        )  # fmt: skip
        self.pid = self._process.pid

    def ready(self) -> None:
        """Waits until the namespace is there."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline():
            return
        why = self._process.stderr.read().strip()
        if os.geteuid() == 0:
            raise _RefusalError(
                f"root may not make network namespaces here ({why}). A container needs the capabilities SYS_ADMIN and "
                "NET_ADMIN."
            )
        raise _RefusalError(f"this is not root, and a user namespace cannot be made either ({why}). Run it as root.")

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv`` in this namespace."""
        return [_tool("nsenter"), "--target", str(self.pid), *self._enter_user, "--net", "--", *argv]

    def configure(self, tool: str, lines: list[str]) -> None:
        """Runs lines of ``ip`` or ``tc`` in this namespace."""
        if not lines:
            return
        command = self.command([_tool(tool), "-batch", "-"])
        done = subprocess.run(command, input="\n".join(lines) + "\n", text=True, capture_output=True, check=False)
        if done.returncode:
            why = " ".join(done.stderr.split())
            unknown = "qdisc kind is unknown" in why or "No such file" in why  # new kernels; old kernels
            hint = "this kernel has no tbf (CONFIG_NET_SCH_TBF): " if tool == "tc" and unknown else ""
            raise _RefusalError(f"{hint}`{tool}` failed with {why!r} at: {'; '.join(lines)}.")

    def counter(self, column: int) -> int:
        """A column of the interface's line in ``/proc/net/dev``."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == _INTERFACE:
                return int(numbers.split()[column])
        raise RuntimeError(f"{_INTERFACE} has disappeared from the namespace of process {self.pid}.")

    def dismiss(self) -> None:
        """Asks the keeper to exit. Closing its pipe is not enough, since forks of this process may hold it open."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("go")
            self._process.stdin.flush()
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def join(self) -> None:
        """Waits until it has exited."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()


class _RefusalError(RuntimeError):
    """This machine cannot make such a network; the message says why, and begins in lower case."""


def _tool(name: str) -> str:
    # /usr/sbin is not in everybody's PATH
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise _RefusalError(f"`{name}` is not installed (Debian: apt install {_PACKAGES[name]}).")
    return path
