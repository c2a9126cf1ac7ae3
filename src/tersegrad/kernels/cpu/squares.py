"""Adding up squares of per-sample gradients, each read once (Numba, one core).

What each function computes is defined by its namesake in ``kernels.reference.squares``.
"""

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels.cpu._arrays import Floats, array
from tersegrad.kernels.ops import check_rows, check_tokens

__all__ = ["add_squares", "add_token_squares"]

Tokens = NDArray[np.int64]


def add_squares(sums: Tensor, gradients: Tensor) -> None:
    """``sums += sum over rows of row * row``."""
    check_rows(sums, gradients)
    _add_squares(array(sums), array(gradients))


def add_token_squares(sums: Tensor, tokens: Tensor, deltas: Tensor, samples: int, skip: int) -> None:
    """The same for an embedding: a text's rows of the same word are summed first."""
    width = check_tokens(sums, tokens, deltas, samples)
    if tokens.numel():
        _add_token_squares(array(sums), array(tokens, torch.int64), array(deltas), samples, skip, width)


@numba.njit(nogil=True, cache=True)
def _add_squares(sums: Floats, gradients: Floats) -> None:
    n = sums.size
    if n == 0:
        return
    for row in range(gradients.size // n):
        gradient = gradients[row * n : (row + 1) * n]
        for i in range(n):
            sums[i] += gradient[i] * gradient[i]


@numba.njit(nogil=True, cache=True)
def _add_token_squares(sums: Floats, tokens: Tokens, deltas: Floats, samples: int, skip: int, width: int) -> None:
    length = tokens.size // samples
    place = np.full(sums.size // width, -1, np.int32)  # for each word, its row in ``rows``
    words = np.empty(length, np.int64)
    rows = np.empty(length * width, np.float32)
    for sample in range(samples):
        count = 0
        for t in range(sample * length, (sample + 1) * length):
            word = tokens[t]
            delta = deltas[t * width : (t + 1) * width]
            if place[word] < 0:
                place[word] = count
                words[count] = word
                rows[count * width : (count + 1) * width] = delta
                count += 1
            else:
                row = rows[place[word] * width : (place[word] + 1) * width]
                for i in range(width):
                    row[i] += delta[i]
        for k in range(count):
            word = words[k]
            place[word] = -1
            if word != skip:
                row = rows[k * width : (k + 1) * width]
                total = sums[word * width : (word + 1) * width]
                for i in range(width):
                    total[i] += row[i] * row[i]
