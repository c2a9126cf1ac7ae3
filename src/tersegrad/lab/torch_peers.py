"""What papers compare with, in torch operations alone: top-k and DGC's selection, as communication hooks of DDP.

Both keep a residual (error feedback), send the chosen values and their positions, 8 bytes an element, by one all-gather
for each bucket, and add up what came. None of our kernels or codecs is used.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

SAMPLE = 0.01  # share of the elements that DGC looks at
TOO_MANY, TOO_FEW = 1.3, 0.8  # times k, beyond which DGC selects again
MOST_TRIES = 10  # of lowering the threshold

Select = Callable[[Tensor, int, torch.Generator], Tensor]


def top_k(x: Tensor, k: int, chance: torch.Generator) -> Tensor:
    """Positions of the k largest magnitudes.

    >>> top_k(torch.tensor([1.0, -3.0, 2.0]), 2, torch.Generator()).sort().values
    tensor([1, 2])
    """
    return torch.topk(x.abs(), k, sorted=False).indices


def sampled(x: Tensor, k: int, chance: torch.Generator) -> Tensor:
    """DGC's selection (Lin et al. 2018), by the rule of its release: a sample's threshold, corrected where it missed.

    One element in every ``stride`` is looked at, from a random one on. The threshold is the smallest of the sample's
    top share. If more than 1.3 k reach it, the k largest of these are taken; while fewer than 0.8 k do, it is lowered
    by a fifth. At most k are sent.
    """
    n, magnitude = x.numel(), x.abs()
    stride = _stride(n, k)
    start = int(torch.randint(stride, (), generator=chance))
    sample = magnitude[start::stride]
    eta = torch.topk(sample, max(1, math.ceil(sample.numel() * k / n)), sorted=False).values.min()
    chosen = (magnitude >= eta).nonzero().flatten()
    for _ in range(MOST_TRIES if stride > 1 else 0):
        if chosen.numel() > TOO_MANY * k:
            chosen = chosen[torch.topk(magnitude[chosen], k, sorted=False).indices]
        elif chosen.numel() < TOO_FEW * k:
            eta = eta * TOO_FEW
            chosen = (magnitude >= eta).nonzero().flatten()
            continue
        break
    return chosen[:k]


def _stride(n: int, k: int) -> int:
    """So that 1 % are seen, and about two of the k largest at least."""
    least = max(math.ceil(SAMPLE * n), math.ceil(2 * n / k))
    return max(1, n // least)


SELECTIONS: dict[str, Select] = {"topk": top_k, "dgc": sampled}


class Peer:
    """One of them, with its residuals."""

    def __init__(self, name: str, ratio: float):
        self._select, self._ratio = SELECTIONS[name], ratio
        self._residuals = _Residuals()
        self._chance = torch.Generator().manual_seed(dist.get_rank())

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """A hook's work: sends a part of residual and gradient, and returns the mean in the bucket's own buffer."""
        out, size = bucket.buffer(), dist.get_world_size()
        total = self._residuals.of(bucket.parameters(), out).add_(out)
        k = min(out.numel(), max(1, round(self._ratio * out.numel())))
        message = self._message(total, k)
        messages = [torch.empty_like(message) for _ in range(size)]
        work = dist.all_gather(messages, message, async_op=True)

        def mean(_: object) -> Tensor:
            out.zero_()
            for positions, values in (one.view(2, k) for one in messages):
                out.index_add_(0, positions.long(), values.view(torch.float32), alpha=1.0 / size)
            return out

        return work.get_future().then(mean)  # type: ignore[no-any-return]

    def _message(self, total: Tensor, k: int) -> Tensor:
        """Positions and the bits of values, as int32; zeros at position 0 where fewer than k were chosen."""
        chosen = self._select(total, k, self._chance)
        message = torch.zeros(2, k, dtype=torch.int32)
        message[0, : chosen.numel()] = chosen
        message[1, : chosen.numel()] = total[chosen].view(torch.int32)
        total[chosen] = 0.0
        return message.view(-1)


class _Residuals:
    """One vector for each bucket; when DDP makes other buckets, every parameter takes its part along."""

    def __init__(self) -> None:
        self._whole: dict[tuple[int, ...], Tensor] = {}
        self._parts: dict[int, Tensor] = {}

    def of(self, parameters: Sequence[Tensor], like: Tensor) -> Tensor:
        key = tuple(map(id, parameters))
        if key not in self._whole:
            known = [self._parts.get(id(p), torch.zeros(p.numel())) for p in parameters]
            self._whole[key] = torch.cat(known).to(like)
            for p, part in zip(parameters, self._whole[key].split([p.numel() for p in parameters]), strict=True):
                self._parts[id(p)] = part
            self._whole = {k: v for k, v in self._whole.items() if k == key or not set(k) & set(key)}
        return self._whole[key]


def reduce_hook(peer: Peer, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """As DDP calls it."""
    return peer.reduce(bucket)
