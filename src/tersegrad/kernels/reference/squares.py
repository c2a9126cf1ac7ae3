"""Adding up squares of per-sample gradients, in plain torch: the definition fast kernels must meet."""

import torch
from torch import Tensor

from tersegrad.kernels.ops import check_rows, check_tokens

__all__ = ["add_squares", "add_token_squares"]


def add_squares(sums: Tensor, gradients: Tensor) -> None:
    """``sums += sum over rows of row * row``, where the rows of ``gradients`` are as long as ``sums``.

    >>> sums = torch.tensor([1.0, 0.0])
    >>> add_squares(sums, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> sums
    tensor([11., 20.])
    """
    check_rows(sums, gradients)
    for row in gradients.view(-1, sums.numel()) if sums.numel() else ():
        sums += row * row


def add_token_squares(sums: Tensor, tokens: Tensor, deltas: Tensor, samples: int, skip: int) -> None:
    """``add_squares`` for an embedding, whose gradient has few non-zero rows.

    ``tokens`` are those of ``samples`` texts of equal length, concatenated; ``deltas`` has a row for each token,
    ``sums`` one for each word. The deltas of one text and one word are summed, squared and added to the word's row. The
    word ``skip`` has no gradient (-1: all have one).

    >>> sums = torch.zeros(3)
    >>> add_token_squares(sums, torch.tensor([0, 0, 2, 0]), torch.tensor([1.0, 2.0, 3.0, 4.0]), 2, -1)
    >>> sums
    tensor([25.,  0.,  9.])
    """
    width = check_tokens(sums, tokens, deltas, samples)
    if tokens.numel() == 0:
        return
    words = sums.numel() // width
    text = torch.arange(samples, device=tokens.device).repeat_interleave(tokens.numel() // samples)
    found, where = torch.unique(text * words + tokens, return_inverse=True)
    rows = torch.zeros(found.numel(), width, device=sums.device).index_add_(0, where, deltas.view(-1, width))
    word = found % words
    sums.view(words, width).index_add_(0, word, (rows * rows).masked_fill_((word == skip)[:, None], 0.0))
