"""What each collective puts on the wire, in the pattern that gloo uses."""

import math
from dataclasses import dataclass

_SIZE_NBYTES = 8  # lengths travel as int64


@dataclass(frozen=True)
class Traffic:
    """What one call of a collective costs one worker: bytes that leave its link, and messages one after another."""

    collective: str
    payload: int  # bytes that the worker handed over
    sent: int  # bytes that leave the worker, in the pattern that gloo uses
    hops: int  # how often the latency of the link is paid


def all_reduce_traffic(size: int, nbytes: int) -> Traffic:
    """Ring: 2(n-1)/n of the vector, in 2(n-1) rounds."""
    return Traffic("all_reduce", nbytes, 2 * (size - 1) * nbytes // size, 2 * (size - 1))


def all_gather_traffic(size: int, lengths: list[int], rank: int, with_sizes: bool) -> Traffic:
    """Ring of n-1 rounds; every block is as long as the longest. One more ring for lengths that nobody knows."""
    block = padded_length(lengths) + (_SIZE_NBYTES if with_sizes else 0)
    return Traffic("all_gather", lengths[rank], (size - 1) * block, (size - 1) * (2 if with_sizes else 1))


def padded_length(lengths: list[int]) -> int:
    """The longest, rounded up so that every received block begins at a whole word."""
    return -(-max(lengths) // 8) * 8


def shift_traffic(size: int, nbytes: int, by: int = 1) -> Traffic:
    """One message to one other worker; none if it is empty, or for this worker itself."""
    leaves = by % size and nbytes
    return Traffic("shift", nbytes, nbytes if leaves else 0, 1 if leaves else 0)


def broadcast_traffic(size: int, nbytes: int, rank: int, root: int) -> Traffic:
    """Binomial tree: who has the vector after a round passes it on in the next."""
    rounds = math.ceil(math.log2(size))
    place = (rank - root) % size
    joined = place.bit_length()  # the round in which this worker got it
    sends = sum(1 for r in range(joined, rounds) if place + (1 << r) < size)
    return Traffic("broadcast", nbytes if rank == root else 0, sends * nbytes, rounds)
