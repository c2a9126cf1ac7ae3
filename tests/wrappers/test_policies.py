"""ByName, BySize and ByDimension: who goes where, alone and one inside the other."""

import pytest
import torch

from support.cases import cases
from tersegrad import parse
from tersegrad.comm import threads
from tersegrad.compressors import TopK
from tersegrad.core import Layout, Step, reduce
from tersegrad.reducers import AllGather, Dense
from tersegrad.testing import reducers
from tersegrad.wrappers import ByDimension, ByName, BySize

LAYOUT = Layout(
    ("conv.weight", "conv.bias", "fc.weight", "embedding.weight"), ((4, 3, 3, 3), (4,), (30, 40), (500, 10))
)


def sent_share(text: str) -> dict[str, float]:
    """Of every parameter, the share of elements that arrive in one step: 1 if it went dense."""
    reducer = parse(text)
    x = torch.linspace(1.0, 2.0, LAYOUT.numel)

    def work(comm):
        out = torch.empty_like(x)
        reduce(reducer, Step(LAYOUT), x.clone(), out, reducer.init(LAYOUT, comm), comm)
        return out

    parts = threads.run(1, work)[0].split(LAYOUT.sizes)
    return {name: float((part != 0).float().mean()) for name, part in zip(LAYOUT.names, parts, strict=True)}


def test_by_size():
    shares = sent_share("BySize({100: AllGather(PerTensor(TopK(0.5))), 2000: AllGather(PerTensor(TopK(0.1)))})")
    assert shares == {"conv.weight": 0.5, "conv.bias": 1.0, "fc.weight": 0.5, "embedding.weight": pytest.approx(0.1)}


def test_by_dimension():
    shares = sent_share("ByDimension({4: AllGather(TopK(0.25))}, default=AllGather(PerTensor(TopK(0.5))))")
    assert shares == {"conv.weight": 0.25, "conv.bias": 0.5, "fc.weight": 0.5, "embedding.weight": 0.5}


def test_policies_compose():
    text = "ByName({'emb*': Dense()}, default=ByDimension({2: BySize({1000: AllGather(TopK(0.1))})}), tiny=0)"
    assert sent_share(text) == {
        "conv.weight": 1.0,
        "conv.bias": 1.0,
        "fc.weight": pytest.approx(0.1),
        "embedding.weight": 1.0,
    }


def test_a_memory_inside_policies_inside_policies_follows_its_parameter_into_other_buckets():
    reducer = parse("ByDimension({2: BySize({100: ErrorFeedback(AllGather(TopK(0.1)))})})")
    reducers.check_state(reducer)
    reducers.check_telescoping(reducer, 2)


@cases(
    "kind rules",
    [
        (ByName, {3: Dense()}),
        (ByName, {"*": TopK(0.1)}),
        (BySize, {"3": Dense()}),
        (BySize, {-1: Dense()}),
        (BySize, {10: TopK(0.1)}),
        (ByDimension, {2.0: Dense()}),
        (ByDimension, {2: "dense"}),
        (ByDimension, [AllGather(TopK(0.1))]),
    ],
)
def test_what_is_not_a_rule_is_refused(kind, rules):
    with pytest.raises(TypeError, match=kind.__name__):
        kind(rules)
