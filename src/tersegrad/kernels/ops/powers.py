"""Signed powers of two, relative to the largest of their group."""

from torch import Tensor

from tersegrad.kernels.ops.answers import read

__all__ = ["DEEPEST", "FAINT", "NOTHING", "check_power_groups"]

DEEPEST = 7  # the smallest power is 2^-7 of the group's largest
FAINT = 0x80  # added to the code of a value that underflows: too small for 3 bits of exponent
NOTHING = -128  # the exponent of a group that holds zeros and denormals only


def check_power_groups(numel: int, groups: Tensor, exponents: Tensor, codes: Tensor) -> None:
    """Raise ValueError unless the group lengths add up to the number of values; this reads ``groups``."""
    total, least = read(groups.sum(), groups.min()) if groups.numel() else (0, 0)
    if total != numel or codes.numel() != numel or exponents.numel() != groups.numel():
        raise ValueError(
            f"{groups.numel()} groups of {total} values, {exponents.numel()} exponents, {codes.numel()} codes and "
            f"{numel} values do not fit together"
        )
    if least < 0:
        raise ValueError(f"a group of {least} values: a group length must not be negative")
