"""Blockwise: the largest of a block exact, all others near, exact sizes."""

import math

import pytest

from support.cases import cases
from support.quantisers import check_refused_number
from tersegrad.compressors import Blockwise


@cases(block=[0, -1, 2.5, True])
def test_refusals(block):
    with pytest.raises(ValueError, match=r"one element or more. The usual is 2048"):
        Blockwise(block)


def test_a_scale_that_cannot_be_is_refused_before_anything_is_added():
    check_refused_number(Blockwise(), math.inf, "not finite")
