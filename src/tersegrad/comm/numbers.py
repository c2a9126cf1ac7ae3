"""Numbers that every worker has for itself, shown to all of them."""

from collections.abc import Sequence

import torch

from tersegrad.core import Comm


def all_gather_floats(mine: Sequence[float], comm: Comm) -> list[list[float]]:
    """Every worker's numbers in rank order, the same bits everywhere; one small all-reduce."""
    table = torch.zeros(comm.size, len(mine), dtype=torch.float64)
    table[comm.rank] = torch.tensor(list(mine), dtype=torch.float64)
    comm.all_reduce(table)  # all other rows are zero here, so nothing is rounded
    rows: list[list[float]] = table.tolist()
    return rows
