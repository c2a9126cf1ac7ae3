"""The workspace stays within its bounds, whatever the layer."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from support.cases import cases
from support.per_sample_cases import channels_last, made, normal, tokens
from tersegrad.per_sample import terms
from tersegrad.per_sample.layers import Use
from tersegrad.per_sample.scan import scan

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


LARGE = {
    "linear on a sequence": (partial(nn.Linear, 30, 40), normal(200, 10, 30)),
    "linear": (partial(nn.Linear, 30, 40), normal(2000, 30)),
    "convolution": (partial(nn.Conv2d, 4, 8, 3), normal(200, 4, 8, 8)),
    "convolution, channels last": (partial(nn.Conv2d, 4, 8, 3), channels_last(normal(200, 4, 8, 8))),
    "grouped convolution": (partial(nn.Conv2d, 4, 8, 3, groups=2), normal(200, 4, 8, 8)),
    "embedding": (partial(nn.Embedding, 7, 16), tokens(200, 20)),
    "layer norm": (partial(nn.LayerNorm, 40), normal(200, 10, 40)),
    "batch norm": (partial(nn.BatchNorm2d, 4), normal(200, 4, 8, 8)),
}


@cases("make x", LARGE.values())
def test_the_workspace_is_bounded(make, x, monkeypatch):
    """However many samples there are."""
    workspace = 1 << 12
    monkeypatch.setattr(terms, "WORKSPACE", workspace)
    monkeypatch.setattr(terms, "CACHE", workspace // 4)
    model = made(make)
    (found,), _ = scan(model)
    y = model(x).detach()
    for name in found.parameters:
        term = found.layer.term(Use(model, True, 0, (x,), (y,)), name)
        sums = torch.zeros_like(getattr(model, name).detach())
        most = 4 * max(workspace, term.workspace)
        assert 4 * y.numel() > 4 * most
        assert peak_bytes(lambda term=term, sums=sums: term.add_squares(sums)) <= 1.5 * most


def peak_bytes(work):
    """The most that torch's allocator had given out at any time."""
    with torch.no_grad():
        work()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
    events = sorted(allocations(profiler.profiler.kineto_results.experimental_event_tree()))
    return max(accumulate((size for _, size in events), initial=0))


def allocations(events):
    for event in events:
        if event.typed[0] == _EventType.Allocation:
            yield event.start_time_ns, event.typed[1].alloc_size
        yield from allocations(event.children)


def test_the_measurement_sees_the_workspace():
    assert peak_bytes(lambda: torch.ones(1000) + torch.ones(1000)) >= 8000


# --- what is refused
