"""One sign bit per element, and means of groups."""

from torch import Tensor

from tersegrad.kernels.ops.bits import packed_nbytes
from tersegrad.kernels.ops.qsgd import bucket_count

__all__ = ["LANES", "check_sign_groups", "check_signs"]

LANES = 32  # signs handled together: groups begin at multiples of this


def check_sign_groups(n: int, bucket: int, count: float) -> None:
    """Raise ValueError unless there is one mean per group, and the group length is a multiple of ``LANES``."""
    if bucket < 1 or (bucket < n and bucket % LANES) or count != bucket_count(n, bucket):
        raise ValueError(
            f"{n} elements in groups of {bucket} do not have {count:g} means; a group is a multiple of {LANES}"
        )


def check_signs(n: int, data: Tensor) -> None:
    """Raise ValueError unless ``data`` has exactly as many bytes as ``n`` signs take."""
    if data.numel() != packed_nbytes(n, 1):
        raise ValueError(f"{n} signs take {packed_nbytes(n, 1)} bytes, not {data.numel()}")
