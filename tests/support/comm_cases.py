"""What every Comm must do, as functions of a Comm; run by threads and by real processes."""

from datetime import timedelta

import torch
import torch.distributed as dist

from tersegrad.comm.torch import TorchComm
from tersegrad.core import Comm


def raw(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def text(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode()


def check(comm: Comm) -> str:
    r, n = comm.rank, comm.size
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.tensor([1.0, r, -2.0], dtype=dtype)
        comm.all_reduce(x)
        assert x.tolist() == [n, n * (n - 1) / 2, -2.0 * n]
    words = ["", "a", "bcd", "efghijklmnop"]
    assert [text(t) for t in comm.all_gather(raw(words[r]))] == words[:n]
    assert [text(t) for t in comm.all_gather(raw(""))] == [""] * n
    assert [text(t) for t in comm.all_gather(raw(str(r)))] == [str(i) for i in range(n)]
    check_started_shifts(comm)
    for root in range(n):
        x = torch.tensor([float(r), 7.0])
        comm.broadcast(x, root)
        assert x.tolist() == [root, 7.0]
    empty = torch.empty(0)
    comm.all_reduce(empty)
    comm.broadcast(empty)
    return "ok"


def check_started_shifts(comm: Comm) -> None:
    """Several messages under way at once, each to its own worker, in order, some shorter than the room for them."""
    r, n = comm.rank, comm.size
    for by in range(1, n + 1):
        rooms = [torch.zeros(20, dtype=torch.uint8) for _ in range(3)]
        pending = [comm.start_shift(raw(f"{r}:{by}" + "x" * i), room, by) for i, room in enumerate(rooms)]
        for i, (message, room) in enumerate(zip(pending, rooms, strict=True)):
            assert message.wait() is room
            assert text(room).rstrip("\0") == f"{(r - by) % n}:{by}" + "x" * i
    nothing = raw("")
    if n > 1:  # a message from rank 0 to rank 1, and none else
        into = torch.zeros(5, dtype=torch.uint8) if r == 1 else nothing
        assert text(comm.start_shift(raw("hello") if r == 0 else nothing, into).wait()) == ("hello" if r == 1 else "")


def over_gloo(size: int) -> str:
    group = dist.new_group(list(range(size)))
    return check(TorchComm(group)) if dist.get_rank() < size else "outside"


def all_reduce_bits(numel: int) -> list[int]:
    """Whether gloo's ring gives the same bits on all ranks is what Dense and AllReduce stand on."""
    comm = TorchComm(dist.group.WORLD)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
    comm.all_reduce(x)
    return x.view(torch.int32).tolist()


def late_neighbour(seconds: float) -> str:
    """Rank 0 never sends; rank 1 must be told so in time, and not wait for ever."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    comm = TorchComm(group)
    if comm.rank != 1:
        return ""
    try:
        comm.start_shift(raw(""), torch.empty(8, dtype=torch.uint8)).wait()
    except RuntimeError as error:
        return str(error)
    return "it arrived"
