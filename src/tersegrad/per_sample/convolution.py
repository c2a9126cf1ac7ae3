"""Convolutions as matrix products over patches: a kernel's gradient is the sum over positions of delta patch(x)^T."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from tersegrad.per_sample.terms import Products, Term


def padding_of(module: Any) -> list[int]:
    """The padding of a convolution as ``functional.pad`` takes it: the last dimension first, both ends of each."""
    if module.padding == "valid":
        return [0, 0] * len(module.kernel_size)
    if module.padding != "same":
        return [amount for padding in reversed(module.padding) for amount in (padding, padding)]
    totals = [dilation * (size - 1) for dilation, size in zip(module.dilation, module.kernel_size, strict=True)]
    return [amount for total in reversed(totals) for amount in (total // 2, total - total // 2)]


def correlation(module: Any, still: Tensor, moving: Tensor, padding: list[int], mode: str) -> Term:
    """Per sample: the sum over positions of ``still`` (channels) times the patch of ``moving`` (channels, *kernel).

    Patches are a view with overlapping strides until they are copied into one matrix for the product. If the channels
    of ``moving`` are adjacent in memory, they stay adjacent in the matrix: copying whole runs is several times faster.

    Args:
        module: the convolution; gives kernel size, stride, dilation and groups.
        still: (samples, channels, *positions): the gradient of the output; of a transposed convolution, its input.
        moving: (samples, channels, *space): the input; of a transposed convolution, the gradient of its output.
        padding: of ``moving``, as ``padding_of`` gives it.
        mode: of the padding, as ``functional.pad`` takes it.
    """
    samples, rows, *size = still.shape
    kernel, groups, positions = module.kernel_size, module.groups, math.prod(size)
    channels = moving.shape[1] // groups
    channels_last = groups == 1 and channels > 1 and moving.stride(1) == 1

    def operands(first: int, last: int) -> tuple[Tensor, Tensor]:
        part = moving[first:last].float()
        patches = _patches(functional.pad(part, padding, mode) if any(padding) else part, module, size)
        left = still[first:last].float().flatten(2)
        if channels_last:
            space, offsets = range(2 + len(kernel), patches.dim()), range(2, 2 + len(kernel))
            return left, patches.permute(0, *space, *offsets, 1).reshape(last - first, positions, -1)
        left = left.reshape((last - first) * groups, -1, positions)
        return left, patches.reshape((last - first) * groups, -1, positions).transpose(1, 2)

    workspace = math.prod(kernel) * channels * groups * positions
    workspace += math.prod(moving.shape[1:]) + math.prod(still.shape[1:])
    if channels_last:
        order = (0, 1 + len(kernel), *range(1, 1 + len(kernel)))
        return Products(samples, operands, workspace, positions, (rows, *kernel, channels), order)
    return Products(samples, operands, workspace, positions, (rows, channels, *kernel), groups=groups)


def _patches(x: Tensor, module: Any, size: Sequence[int]) -> Tensor:
    """All patches of ``x`` as a view of shape (samples, channels, *kernel, *positions)."""
    samples, channels, *space = x.stride()
    offsets = [stride * dilation for stride, dilation in zip(space, module.dilation, strict=True)]
    steps = [stride * step for stride, step in zip(space, module.stride, strict=True)]
    return x.as_strided((*x.shape[:2], *module.kernel_size, *size), (samples, channels, *offsets, *steps))
