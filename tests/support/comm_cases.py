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
    check_started_sums(comm)
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


def check_started_sums(comm: Comm) -> None:
    """Several sums under way at once; each is there, in place, when it has been waited for."""
    vectors = [torch.full((5,), float(10 * i + comm.rank)) for i in range(3)]
    pending = [comm.start_all_reduce(x) for x in vectors]
    for i, (message, x) in enumerate(zip(pending, vectors, strict=True)):
        assert message.wait() is x
        assert x.tolist() == [sum(10 * i + rank for rank in range(comm.size))] * 5


def check_started_shifts(comm: Comm) -> None:
    """Several messages under way at once, each to its own worker, in order, some shorter than their buffers."""
    r, n = comm.rank, comm.size
    for by in range(1, n + 1):
        buffers = [torch.zeros(20, dtype=torch.uint8) for _ in range(3)]
        pending = [comm.start_shift(raw(f"{r}:{by}" + "x" * i), into, by) for i, into in enumerate(buffers)]
        for i, (message, into) in enumerate(zip(pending, buffers, strict=True)):
            assert message.wait() is into
            assert text(into).rstrip("\0") == f"{(r - by) % n}:{by}" + "x" * i
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


def silent_neighbour(seconds: float) -> str:
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
