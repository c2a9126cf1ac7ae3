"""Whether all workers hold the same parameters, to the bit."""

import torch
from torch import Tensor

from tersegrad import kernels
from tersegrad.core import Comm


class ReplicasDifferError(ValueError):
    """Some parameter is not the same on all ranks."""


def compare(parameters: dict[str, Tensor], comm: Comm, step: int) -> None:
    """Raises on every rank, with the name of the first parameter that differs; 8 bytes a parameter travel."""
    mine = torch.tensor([_checksum(p) for p in parameters.values()], dtype=torch.int64)
    theirs = [sums.clone().view(torch.int64) for sums in comm.all_gather(mine.view(torch.uint8))]
    table = torch.stack(theirs)
    differs = (table != table[0]).any(0)
    if bool(differs.any()):
        first = int(differs.nonzero()[0])
        raise ReplicasDifferError(
            f"before step {step}, parameter {list(parameters)[first]} is not the same on all ranks: "
            f"{_odd_ones(table[:, first].tolist(), comm)} ({int(differs.sum())} of {len(parameters)} parameters "
            "differ). Weights were changed on some ranks only, or the model was not the same when DDP was made."
        )


def _odd_ones(votes: list[int], comm: Comm) -> str:
    """Who holds something else than most, where there are most."""
    usual = max(votes, key=votes.count)
    names = {vote: [str(comm.name(rank)) for rank, other in enumerate(votes) if other == vote] for vote in votes}
    if 2 * len(names[usual]) <= len(votes):
        return f"no majority of ranks holds the same, {' against '.join(' and '.join(n) for n in names.values())}"
    odd = [name for vote, those in names.items() if vote != usual for name in those]
    return f"rank {', '.join(odd)} holds something else than most"


def _checksum(parameter: Tensor) -> int:
    """xxh64 of the bytes, as a signed number."""
    data = parameter.detach().contiguous().view(-1).view(torch.uint8)
    value: int = kernels.on(data).xxh64(data)
    return value - (1 << 64) if value >= 1 << 63 else value
