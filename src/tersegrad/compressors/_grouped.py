"""Shared by quantisers with a few float32 numbers per group: groups of ``bucket`` elements, and bodies of two parts.

Body: the groups' numbers (float32), then the codes.
"""

import torch
from torch import Tensor

from tersegrad.core import Compressor, Payload
from tersegrad.kernels.ops import bucket_count

NUMBER_NBYTES = 4


def groups_of(n: int, bucket: int | None) -> tuple[int, int]:
    """The length of a group (the whole vector if ``bucket`` is None), and the number of groups.

    >>> groups_of(1000, None), groups_of(1000, 512), groups_of(0, None)
    ((1000, 1), (512, 2), (1, 0))
    """
    length = max(n, 1) if bucket is None else bucket
    return length, bucket_count(n, length)


def require_bucket(spec: Compressor, bucket: int | None, multiple: int) -> None:
    """Raise ValueError unless the group length is None or a multiple of the kernels' vector width."""
    if bucket is None or (type(bucket) is int and bucket > 0 and bucket % multiple == 0):
        return
    name = type(spec).__name__
    near = max(multiple, round(bucket / multiple) * multiple) if isinstance(bucket, int | float) else multiple
    raise ValueError(
        f"{name}(bucket={bucket!r}): a group has a whole number of elements, {multiple} or a multiple of that. "
        f"Write {name}(bucket={near}), or {name}(bucket=None) for one group."
    )


def grouped_sections(payload: Payload, numbers: int, name: str) -> dict[str, int]:
    """The number of bytes of the numbers, under this name, and of the codes."""
    if not payload.finite:
        return {}
    return {name: NUMBER_NBYTES * numbers, "codes": payload.body.numel() - NUMBER_NBYTES * numbers}


def numbers_and_codes(payload: Payload, numbers: int) -> tuple[Tensor, Tensor]:
    """Views of the two parts of a body that is to be written: numbers and codes."""
    split = NUMBER_NBYTES * numbers
    return payload.body[:split].view(torch.float32), payload.body[split:]


def read(spec: Compressor, payload: Payload, numbers: int, codes: int) -> tuple[Tensor, Tensor]:
    """The numbers (a copy: a body may be unaligned) and the codes of a payload; ValueError if its length is wrong."""
    split = NUMBER_NBYTES * numbers
    if payload.body.numel() != split + codes:
        raise ValueError(
            f"{payload.numel} elements of {spec!r} take {split + codes} bytes, got {payload.body.numel()}."
        )
    found = payload.body[:split].clone().view(torch.float32)
    if not bool(found.isfinite().all()):
        raise ValueError(f"{spec!r} received a number of a group that is not finite.")
    return found, payload.body[split:]
