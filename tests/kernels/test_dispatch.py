"""One dispatch by device; every kernel has a reference of the same name."""

import pytest
import torch

from tersegrad import kernels
from tersegrad.kernels import cpu, reference


def test_both_have_the_same_kernels():
    assert cpu.__all__ == reference.__all__


def test_cpu_tensors_get_the_fast_ones():
    assert kernels.on(torch.zeros(1)) is cpu


def test_another_device_gets_the_reference_and_one_warning():
    kernels._backend.cache_clear()
    with pytest.warns(UserWarning, match="no kernels for meta yet: the plain torch reference runs there"):
        assert kernels.on(torch.zeros(1, device="meta")) is reference
    assert kernels.on(torch.zeros(1, device="meta")) is reference  # said once
