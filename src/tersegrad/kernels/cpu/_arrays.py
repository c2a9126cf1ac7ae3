"""Tensors as checked NumPy arrays, and the scalar types that kernels compute with."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tersegrad.kernels import ops

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

# Wrapped around every operation of a kernel: otherwise Numba widens to 64 bits, which halves the SIMD lanes.
i32: Any = np.int32
u32: Any = np.uint32
u64: Any = np.uint64
f32: Any = np.float32

ABS_MASK = np.int32(ops.ABS_MASK)  # everything but the sign
INF_BITS = np.int32(ops.INF_BITS)  # |x| has these bits or more <=> x is infinite or NaN


def array(tensor: Tensor, dtype: torch.dtype | None = torch.float32) -> NDArray[Any]:
    """A tensor's memory as an array, without a copy; ``dtype=None`` accepts any dtype."""
    usable = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not usable or (dtype is not None and tensor.dtype != dtype):
        seen = f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        raise TypeError(f"a CPU kernel takes contiguous 1-D {dtype or 'tensors'} on cpu, got {seen}")
    if tensor.numel() > ops.ABS_MASK and tensor.dtype != torch.uint8:
        raise ValueError(f"positions are int32: a vector of {tensor.numel()} elements must be split")
    return tensor.detach().numpy()


def patterns(x: Tensor) -> Ints:
    """The bit patterns of a float32 vector."""
    return array(x).view(np.int32)


def float32(value: float) -> np.float32:
    """Round to float32 as torch does: overflow gives infinity, without a warning."""
    with np.errstate(over="ignore"):
        return np.float32(value)


def first_bits_above(threshold: float) -> np.int32:
    """The smallest bit pattern of a magnitude above the threshold."""
    ops.check_threshold(threshold)
    rounded = float32(threshold)
    return np.int32(0) if rounded < 0 else np.int32(abs(rounded).view(np.int32) + 1)
