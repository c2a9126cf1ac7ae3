"""What kernels tell the host is read together: on a device every reading waits for it."""

import pytest
import torch

from tersegrad import kernels, parse
from tersegrad.core import Layout, Sum, encode

# Whether the selection holds is known before its values are gathered; all else is read at once.
MOST = {"TopK(0.01)": 2, "TopK(0.01, values=BF16())": 2, "Threshold(1.0)": 2, "SIDCo(0.01)": 4}


@pytest.mark.parametrize("spec", MOST)
def test_a_sparse_method_reads_seldom(spec, monkeypatch):
    read, calls = kernels.read, []

    def counted(*answers):
        calls.append(len(answers))
        return read(*answers)

    layout = Layout.flat(50_000)
    compressor = parse(spec)
    state = compressor.init(layout, 0)
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    encode(compressor, x, state)  # what is learnt from the first step
    monkeypatch.setattr(kernels, "read", counted)
    encode(compressor, Sum(x, x, torch.empty_like(x)), state)
    assert len(calls) <= MOST[spec], calls
    assert max(calls) >= 2, "finite or not, and the length of the indices, are read together"
