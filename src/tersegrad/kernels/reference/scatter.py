"""A sum of sparse vectors."""

from torch import Tensor

from tersegrad.kernels.reference.select import check_indices, check_pairs, scatter_add


def scatter_sum(indices: Tensor, values: Tensor, counts: list[int], scale: float, out: Tensor) -> bool:
    """``out = scale * (sum of sparse vectors)``, added one after the other; whether all of ``out`` is finite.

    Indices and values of all vectors stand one after the other, ``counts`` of each; those of one vector ascend.

    >>> import torch
    >>> out = torch.empty(4)
    >>> scatter_sum(torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([1.0, 2.0, 4.0]), [2, 1], 0.5, out)
    True
    >>> out.tolist()
    [0.5, 0.0, 3.0, 0.0]
    """
    check_counts(indices, values, counts)
    check_ascending(indices, counts, out.numel())
    out.zero_()
    parts = zip(indices.split(counts), values.split(counts), strict=True)
    finite = [scatter_add(out, positions, part, scale) for positions, part in parts]
    return all(finite)


def check_counts(indices: Tensor, values: Tensor, counts: list[int]) -> None:
    """Raise ValueError unless there is one value for each index, and ``counts`` are of all of them."""
    check_pairs(indices, values)
    if sum(counts) != indices.numel() or min(counts, default=0) < 0:
        raise ValueError(f"{indices.numel()} indices, and vectors that have {counts} of them")


def check_ascending(indices: Tensor, counts: list[int], n: int) -> None:
    """Raise IndexError unless every index is in [0, n), and those of each vector ascend."""
    check_indices(indices, n)
    if any(bool((part.diff() <= 0).any()) for part in indices.split(counts)):
        raise IndexError("the indices of one sparse vector must ascend")
