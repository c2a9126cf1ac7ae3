"""OneBit: two means a group, exact sizes, laws with error feedback, and what went wrong elsewhere."""

import math

import torch

from support.cases import cases
from support.quantisers import check_refused_number
from tersegrad.compressors import OneBit
from tersegrad.engine.roundtrip import roundtrip


def test_the_complement_of_a_byte_is_not_a_logical_not():
    """A peer decodes [-1, -1, 2, 2] to [507, 507, 510, 510], and error feedback hides it."""
    decoded, _ = roundtrip(OneBit(), torch.tensor([-1.0, -1.0, 2.0, 2.0]))
    assert decoded.tolist() == [-1.0, -1.0, 2.0, 2.0]


@cases(means=[(math.nan, 0.0), (0.0, -math.inf), (-1.0, 0.0), (1.0, 1.0)])
def test_means_that_cannot_be_are_refused_before_anything_is_added(means):
    check_refused_number(OneBit(), means, r"OneBit\(\)")
