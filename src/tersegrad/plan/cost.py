"""The cost of collectives: closed forms with a latency and a bandwidth term, and two papers' break-even points.

A link takes bytes / bandwidth + hops * latency, as ``comm.throttled.Throttled`` does: bytes that leave one worker, and
messages that follow each other. Messages that the worker itself sends (not the library in an all-reduce) also cost the
time to start one. With n workers and a vector, or a payload, of B bytes:

| exchange | bytes that leave a worker | hops | own messages | decoded payloads |
|---|---|---|---|---|
| ring all-reduce | 2 (n-1)/n B | 2 (n-1) | | |
| all-gather in a ring, padded to the longest | (n-1) max B | n-1 | | n |
| all-gather in a pipelined ring, blocks of m | sum of B, in whole blocks | blocks | | n |
| all-gather straight to all (``exchange.start_gather``) | (n-1) B | 1 | n-1 | n |
| two shots | 2 (n-1)/n B | 2 | 2 (n-1) | 2 - 1/n |
| compressed ring | 2 (n-1)/n B | 2 (n-1) | 2 (n-1) | 2 - 1/n |
| to one other worker | B | 1 | 1 | 2 |
| broadcast in a binomial tree, at its root | ceil(log2 n) B | ceil(log2 n) | | 1 |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tersegrad.comm.traffic import all_gather_traffic, all_reduce_traffic
from tersegrad.core import HEADER_NBYTES

ALL_REDUCE, ALL_GATHER, TWO_SHOT, RING = "all_reduce", "all_gather", "two_shot", "ring"
RING_GATHER, NEIGHBOUR, BROADCAST = "ring_gather", "neighbour", "broadcast"
EXCHANGES = (ALL_REDUCE, ALL_GATHER, TWO_SHOT, RING, RING_GATHER, NEIGHBOUR, BROADCAST)


@dataclass(frozen=True)
class Link:
    """One worker's link: bytes per second, seconds per hop, and the share of that time that keeps a core busy."""

    bandwidth: float = math.inf
    latency: float = 0.0
    overhead: float = 0.0  # seconds to start one message
    busy: float = 0.0  # 0: the network card does all the work; 1: sockets and copies keep a core busy

    def seconds(self, nbytes: float, hops: float, messages: float = 0) -> float:
        """Seconds to send so many bytes.

        >>> Link(bandwidth=1e6, latency=0.01).seconds(500_000, hops=2)
        0.52
        """
        return nbytes / self.bandwidth + hops * self.latency + messages * self.overhead


class Load(NamedTuple):
    """The load of a collective on one worker's link."""

    sent: int  # bytes
    hops: int
    messages: int  # that the worker itself starts


# ---- closed forms --------------------------------------------------------------------------------


def ring_all_reduce(workers: int, nbytes: int, link: Link) -> float:
    """2 (n-1)/n B / bandwidth + 2 (n-1) latency."""
    traffic = all_reduce_traffic(workers, nbytes)
    return link.seconds(traffic.sent, traffic.hops)


def naive_all_gather(lengths: Sequence[int], link: Link) -> float:
    """A ring in which every block is as long as the longest: (n-1) max B / bandwidth + (n-1) latency."""
    traffic = all_gather_traffic(len(lengths), list(lengths), 0, with_sizes=False)
    return link.seconds(traffic.sent, traffic.hops)


def pipelined_all_gather(lengths: Sequence[int], block: int, link: Link) -> float:
    """Traeff et al. 2008, as VGC counts it: sum over workers of ceil(B_i / m) rounds of m / bandwidth + latency.

    With no latency and small blocks that is the sum of all payloads; the paper's bound is (n B + n m) / bandwidth.
    """
    rounds = sum(-(-length // block) for length in lengths)
    return link.seconds(rounds * block, rounds)


def direct_all_gather(workers: int, nbytes: int, link: Link) -> float:
    """Every worker sends to all others at once: (n-1) B / bandwidth + latency."""
    return _exchange_seconds(ALL_GATHER, workers, nbytes, link)


def two_shot(workers: int, nbytes: int, link: Link) -> float:
    """Segments to the workers that reduce them, means to all: 2 (n-1)/n B / bandwidth + 2 latency, with headers."""
    return _exchange_seconds(TWO_SHOT, workers, nbytes, link)


def compressed_ring(workers: int, nbytes: int, link: Link) -> float:
    """The bytes of two shots, in 2 (n-1) hops."""
    return _exchange_seconds(RING, workers, nbytes, link)


def _exchange_seconds(exchange: str, workers: int, nbytes: int, link: Link) -> float:
    return link.seconds(*load(exchange, workers, nbytes))


def load(exchange: str, workers: int, nbytes: int) -> Load:
    """The load of one bucket whose whole payload has ``nbytes`` bytes, including the header.

    >>> load("all_gather", 4, 1000)
    Load(sent=3000, hops=1, messages=3)
    """
    others = workers - 1
    if others == 0:
        return Load(0, 0, 0)
    if exchange == ALL_REDUCE:
        return Load(2 * others * nbytes // workers, 2 * others, 0)
    if exchange == ALL_GATHER:
        return Load(others * nbytes, 1, others)
    if exchange == RING_GATHER:
        return Load(others * nbytes, others, 0)
    if exchange == NEIGHBOUR:
        return Load(nbytes, 1, 1)
    if exchange == BROADCAST:
        rounds = math.ceil(math.log2(workers))
        return Load(rounds * nbytes, rounds, 0)
    if exchange in (TWO_SHOT, RING):
        body = max(0, nbytes - HEADER_NBYTES)  # every segment has a header of its own
        hops = 2 if exchange == TWO_SHOT else 2 * others
        return Load(2 * others * (body // workers + HEADER_NBYTES), hops, 2 * others)
    raise ValueError(f"there is no cost model for {exchange!r}; there are: {', '.join(EXCHANGES)}.")


def payloads_decoded(exchange: str, workers: int) -> float:
    """How many whole payloads one worker decodes.

    >>> payloads_decoded("all_gather", 8), payloads_decoded("two_shot", 4)
    (8, 1.75)
    """
    if exchange in (ALL_GATHER, RING_GATHER):
        return workers
    if exchange in (TWO_SHOT, RING):
        return 2.0 - 1.0 / workers
    return 2.0 if exchange == NEIGHBOUR else 1.0


# ---- two papers ----------------------------------------------------------------------------------


def vgc_gain(workers: int, ratio: float) -> float:
    """VGC (Tsuzuku et al. 2018): time of a ring all-reduce over that of a pipelined all-gather of 1/ratio of the bytes.

    T_r / T_v = 2 (p-1) c / p^2: the special case of this module's forms with no latency, small blocks and no coding.
    """
    return 2 * (workers - 1) * ratio / workers**2


def vgc_break_even(workers: int) -> float:
    """The compression ratio from which on an all-gather beats a dense all-reduce: c = p^2 / (2 (p-1)).

    >>> round(vgc_break_even(16), 2)
    8.53
    """
    return workers**2 / (2 * (workers - 1))


def fft_least_ratio(network: float, change: float, fft: float, packing: float, selection: float) -> float:
    """The FFT paper (Wang et al. 2020): the ratio k above which compressing pays; infinite if none does.

    k = 1 / (1 - 2 T_comm (4/T_m + 1/T_f + 1/T_p + 1/T_s)), all rates in bytes per second: the network's, and those of
    changing precision (four passes), of the transform, of packing and of selection. Decompression costs as much
    as compression, a message costs its bytes only, nothing overlaps with backward.
    """
    gain = 1 - 2 * network * (4 / change + 1 / fft + 1 / packing + 1 / selection)
    return 1 / gain if gain > 0 else math.inf
