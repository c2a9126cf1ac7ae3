"""Network: the links are as slow as asked, the counters are right, and nothing is left behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tersegrad.comm.traffic import all_reduce_traffic
from tersegrad.lab import network as lab
from tersegrad.lab.network import MAX_HOSTS, Network, latency_supported, permitted

SOURCES = Path(lab.__file__).parents[2]
NOBODY = 65534
PATIENCE = 20.0  # seconds; far above what anything here needs

needs_network = pytest.mark.usefixtures("network_permitted")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives rights up, so it needs root")

SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
STUBBORN = [sys.executable, "-I", "-S", "-c"]
STUBBORN += ["import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"]

RECEIVER = """
import socket, sys, time
with socket.create_server(("", 5001)) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
count, started = 0, None
while got := len(connection.recv(1 << 20)):
    started = started or time.perf_counter()
    count += got
print(count / (time.perf_counter() - started))
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture
def network_permitted():
    if reason := permitted():
        pytest.skip(reason)


def transfer(network: Network, source: int, target: int, nbytes: int) -> float:
    """Payload bytes a second over one TCP connection."""
    receive = network.command(target, [sys.executable, "-I", "-c", RECEIVER])
    send = network.command(source, [sys.executable, "-I", "-c", SENDER, network.address(target), str(nbytes)])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout.readline() == "listening\n"
        subprocess.run(send, check=True, timeout=PATIENCE)
        return float(receiver.stdout.readline())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually_dead(pids: list[int]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def machine() -> dict[str, object]:
    """The machine's own interfaces, addresses, routes and queues, without what changes by the second."""
    found = {}
    for question in ("ip -j addr", "ip -j route", "ip -j -6 route", "tc -j qdisc"):
        tool, *rest = question.split()
        answer = subprocess.run([lab._tool(tool), *rest], capture_output=True, check=True).stdout
        found[question] = json.loads(answer or "[]", object_hook=without_lifetimes)
    return found


def without_lifetimes(entry: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in entry.items() if k not in ("expires", "valid_life_time", "preferred_life_time")}


@needs_network
def test_up_and_down_as_often_as_you_like():
    network = Network(2, "1Gbit")
    for _ in range(2):
        network.up()
        network.up()
        pids = [keeper.pid for keeper in network._keepers]
        assert len(pids) == 3
        assert network.sent_bytes(0) + network.received_bytes(1) < 2000  # a stray frame of the kernel's own at most
        network.down()
        network.down()
        assert not any(map(alive, pids))


@needs_network
def test_the_machine_itself_is_not_touched():
    before = machine()
    with Network(3, "1Gbit") as network:
        transfer(network, 0, 2, 10_000)
        assert machine() == before
    assert machine() == before


@needs_network
def test_bandwidth_and_counters():
    nbytes = 2_000_000
    with Network(3, "100Mbit") as network:
        rates = [8 * transfer(network, 0, 1, nbytes) for _ in range(3)]
        assert max(rates) < 103e6
        assert max(rates) > 85e6  # a busy machine makes some slower
        nbytes *= 3
        for counted in (network.sent_bytes(0), network.received_bytes(1)):
            assert nbytes < counted < 1.06 * nbytes
        assert network.received_bytes(0) < 0.06 * nbytes  # acknowledgements
        assert network.sent_bytes(2) < 2000


@needs_network
def test_a_host_reaches_the_others_and_nothing_else():
    with Network(1) as network:
        probe = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"
        command = network.command(0, [sys.executable, "-I", "-c", probe])
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
        assert "Network is unreachable" in done.stderr


WORKER = """
import sys, torch
import torch.distributed as dist
rank, size, address, numel = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=size)
x = torch.full((numel,), 1.0 + rank)
dist.barrier()
print("ready", flush=True)
sys.stdin.readline()
dist.all_reduce(x)
print(x.min().item(), x.max().item(), flush=True)
sys.stdin.readline()
dist.destroy_process_group()
"""


@needs_network
def test_gloo_sends_what_the_traffic_model_says():
    size, numel = 2, 1_000_000
    with Network(size, "200Mbit") as network:
        workers = []
        for rank in range(size):
            argv = [sys.executable, "-c", WORKER, str(rank), str(size), network.address(0), str(numel)]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": network.interface(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            workers.append(subprocess.Popen(network.command(rank, argv), env=environment, **pipes))
        assert [worker.stdout.readline() for worker in workers] == ["ready\n"] * size
        before = [network.sent_bytes(rank) for rank in range(size)]
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        assert [worker.stdout.readline() for worker in workers] == ["3.0 3.0\n"] * size
        sent = [network.sent_bytes(rank) - before[rank] for rank in range(size)]
        for worker in workers:
            worker.communicate("stop\n", timeout=PATIENCE)
    expected = all_reduce_traffic(size, 4 * numel).sent
    assert all(expected < nbytes < 1.08 * expected for nbytes in sent)
    assert [worker.returncode for worker in workers] == [0] * size


@needs_network
def test_down_ends_what_command_started():
    with subprocess.Popen(SLEEPER) as outside:
        with Network(2) as network:
            mild = subprocess.Popen(network.command(0, SLEEPER))
            stubborn = subprocess.Popen(network.command(1, STUBBORN), stdout=subprocess.PIPE)
            with stubborn.stdout:
                assert stubborn.stdout.readline() == b"on\n"
        assert mild.wait(PATIENCE) == -signal.SIGTERM
        assert stubborn.wait(PATIENCE) == -signal.SIGKILL
        assert outside.poll() is None
        outside.kill()


OWNER = f"""
import os, subprocess, time
from tersegrad.lab.network import Network
network = Network(2, "100Mbit")
network.up()
worker = subprocess.Popen(network.command(1, {SLEEPER!r}))
source, sink = os.pipe()
child = os.fork()  # has the pipes to the keepers, too
if child:
    os.read(source, 1)
    print(child, worker.pid, *[keeper.pid for keeper in network._keepers], flush=True)
else:
    network.down()  # is not its own: nothing happens
    os.write(sink, b"x")
time.sleep(600)
"""


@needs_network
def test_a_killed_owner_leaves_nothing():
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        child, *pids = map(int, owner.stdout.readline().split())
        assert len(pids) == 4
        assert all(map(alive, pids))
        owner.kill()
        try:
            assert eventually_dead(pids)
        finally:
            os.kill(child, signal.SIGKILL)


ANYBODY = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from tersegrad.lab.network import Network, permitted
from test_network import transfer
result = dict(uid=os.geteuid(), refused=permitted())
if result["refused"] is None:
    with Network(2, "100Mbit") as network:
        result["rate"] = transfer(network, 0, 1, 1_000_000)
        result["sent"] = network.sent_bytes(0)
        result["pids"] = [keeper.pid for keeper in network._keepers]
print(json.dumps(result))
"""


@needs_root
def test_without_root_in_a_user_namespace():
    packages = [path for path in sys.path if path.endswith("site-packages")]
    environment = {"PYTHONPATH": os.pathsep.join([str(SOURCES), *packages])}
    version = f"python3.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}"):  # nobody may not be allowed to run the first
        anybody = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/", "env": environment}
        try:
            done = subprocess.run([python, "-c", ANYBODY], capture_output=True, text=True, timeout=60, **anybody)
        except OSError:
            continue
        break
    else:
        pytest.skip("nobody may run no Python here")
    if "PermissionError" in done.stderr:
        pytest.skip("nobody may not read the sources")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["uid"] == NOBODY
    if result["refused"]:
        pytest.skip(f"permitted() says: {result['refused']}")
    assert 50e6 < 8 * result["rate"] < 105e6  # a busy machine makes it slower
    assert 1_000_000 < result["sent"] < 1_060_000
    assert not any(map(alive, result["pids"]))


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_root_without_capabilities_is_told_what_it_lacks():
    weak = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c"]
    asked = "from tersegrad.lab.network import permitted; print(permitted())"
    answer = subprocess.run([*weak, asked], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "root may not make network namespaces" in answer
    assert "SYS_ADMIN" in answer


def test_a_missing_tool_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "tc" else f"/usr/bin/{name}")
    with pytest.raises(RuntimeError, match=r"`tc` is not installed \(Debian: apt install iproute2\)"):
        lab._tool("tc")
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert permitted.__wrapped__() == "`unshare` is not installed (Debian: apt install util-linux)."
    with pytest.raises(RuntimeError, match=r"cannot be made here: `unshare` .* Throttled\('1Gbit'\) emulates"):
        Network(2, "1Gbit").up()


def test_latency():
    if not latency_supported():
        pytest.skip("this kernel has no netem")
    answer = "import socket; s = socket.create_server(('', 5001)); print('on', flush=True); s.accept()[0].recv(1)"
    ask = "import socket, sys, time; t = time.perf_counter(); socket.create_connection((sys.argv[1], 5001)); "
    ask += "print(time.perf_counter() - t)"
    with Network(2, "100Mbit", latency="20ms") as network:
        server = network.command(1, [sys.executable, "-I", "-c", answer])
        with subprocess.Popen(server, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            client = network.command(0, [sys.executable, "-I", "-c", ask, network.address(1)])
            seconds = float(subprocess.run(client, capture_output=True, check=True, timeout=PATIENCE).stdout)
    assert 0.04 <= seconds < 0.15  # there and back, and perhaps once more for the ARP question


def test_latency_that_cannot_be_is_refused_with_the_alternative():
    if latency_supported():
        pytest.skip("this kernel has netem")
    with pytest.raises(ValueError, match=r"Throttled\('100Mbit', latency='20ms'\)"):
        Network(2, "100Mbit", latency="20ms")
    with pytest.raises(ValueError, match="delayed or lost here"):
        Network(2, "100Mbit", loss=0.01)


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((0,), {}, "1 to 64 hosts"),
        ((MAX_HOSTS + 1,), {}, "1 to 64 hosts"),
        ((2, "fast"), {}, "'fast' is not a rate"),
        ((2, "0Mbit"), {}, "carries nothing"),
        ((2, "10bit"), {}, "8kbit or more"),
        ((2, "1Gbit"), {"latency": "20"}, "'20' is not a time"),
        ((2, "1Gbit"), {"loss": 1.5}, "share of the packets"),
    ],
)
def test_bad_input(arguments, options, match):
    with pytest.raises(ValueError, match=match):
        Network(*arguments, **options)


def test_bad_rank_and_a_network_that_is_down():
    network = Network(2, "1Gbit")
    with pytest.raises(ValueError, match="hosts 0 to 1"):
        network.address(2)
    with pytest.raises(RuntimeError, match="The network is down"):
        network.command(0, ["true"])
    assert socket.inet_aton(network.address(0)) != socket.inet_aton(network.address(1))
