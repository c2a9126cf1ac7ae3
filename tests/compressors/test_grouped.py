"""Groups and bodies of quantisers with a number or two a group."""

import pytest
import torch

from support.cases import cases
from tersegrad.compressors import OneBit, ScaledSign, TernGrad
from tersegrad.compressors._grouped import read
from tersegrad.core import Payload


@cases(cls=[ScaledSign, OneBit])
@cases(bucket=[0, -32, 100, 12.5, True, "64"])
def test_a_group_that_the_kernels_cannot_cut_is_refused(cls, bucket):
    with pytest.raises(ValueError, match=r"32 or a multiple of that.*bucket=\d+\), or .*bucket=None"):
        cls(bucket=bucket)


def test_the_refusal_says_a_group_that_is_near():
    with pytest.raises(ValueError, match=r"Write OneBit\(bucket=96\), or OneBit\(bucket=None\)"):
        OneBit(bucket=100)
    assert TernGrad(bucket=100).bucket == 100


def test_read_refuses_another_length_and_what_is_not_finite():
    body = torch.cat([torch.tensor([1.0, torch.nan]).view(torch.uint8), torch.zeros(2, dtype=torch.uint8)])
    with pytest.raises(ValueError, match=r"10 elements of ScaledSign\(\) take 6 bytes, got 10"):
        read(ScaledSign(), Payload(body, 10), 1, 2)
    with pytest.raises(ValueError, match="not finite"):
        read(ScaledSign(), Payload(body, 10), 2, 2)
