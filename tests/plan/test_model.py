"""The model's buckets, as torch itself makes them, and when they are filled."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tersegrad.core import Layout
from tersegrad.plan import model


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 2000), st.integers(1, 4000))
def test_buckets_are_those_that_torch_makes(sizes, first, cap):
    tensors = [torch.empty(size) for size in sizes]
    expected, _ = dist._compute_bucket_assignment_by_size(tensors, [first, cap])
    named = [(str(i), (size,)) for i, size in enumerate(sizes)]
    assert [list(map(int, bucket.names)) for bucket in model.assign_buckets(named, first, cap)] == expected


def small():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 300_000 // 8), nn.Linear(300_000 // 8, 4))
    return net, lambda: net(torch.ones(2, 8)).square().mean()


def test_buckets_of_a_model_begin_at_its_end():
    net, _ = small()
    buckets = model.buckets_of(net)
    assert buckets[0].names == ("1.bias", "1.weight", "0.bias", "0.weight")
    assert sum(bucket.numel for bucket in buckets) == sum(p.numel() for p in net.parameters())
    net[0].weight.requires_grad_(False)
    assert model.buckets_of(net)[-1].names[-1] == "0.bias"


@pytest.mark.parametrize("numel", [10, 1024, 5_000_000, 25_600_000])
def test_buckets_of_a_size(numel):
    buckets = model.buckets_of_size(numel)
    assert sum(bucket.numel for bucket in buckets) == numel
    assert all(4 * bucket.numel <= model.CAP + 4 * 1024 * 1024 for bucket in buckets)


def test_measure_gives_a_timeline_and_leaves_no_hook():
    net, loss = small()
    calls = []
    compute, buckets = model.measure(net, loss, lambda: calls.append(1))
    assert len(calls) == model.WARMUP + model.ROUNDS
    assert compute.forward > 0
    assert list(compute.ready) == sorted(compute.ready)
    assert 0 < compute.ready[-1] <= compute.backward
    assert len(compute.ready) == len(buckets)
    assert buckets[0].names[0].startswith("1.")  # the last layer's gradients come first
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    gradients = model.gradients_for(buckets, net)
    assert torch.equal(gradients[0][: net[1].bias.numel()], net[1].bias.grad) or buckets[0].names[0] != "1.bias"


def test_a_known_step_is_split_in_proportion():
    compute = model.compute_of(0.3, [Layout.flat(100), Layout.flat(300)])
    assert compute.seconds == pytest.approx(0.3)
    assert compute.ready == pytest.approx((0.05, 0.2))


def test_noise_stands_in_for_gradients():
    (noise,) = model.gradients_for([Layout.flat(10_000)], None)
    assert bool(noise.isfinite().all())
    assert 0.9 < float(noise.abs().mean()) < 1.1
    assert abs(float(noise.mean())) < 0.05


@pytest.mark.parametrize(
    ("text", "said"),
    [("nonsense", "module:factory"), ("no_such_module:f", "no_such_module"), ("math:pi2", "pi2")],
)
def test_a_model_that_is_not_there(text, said):
    with pytest.raises(ValueError, match=said):
        model.load(text)


def test_a_factory_gives_a_model(tmp_path, monkeypatch):
    (tmp_path / "my_plan_model.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(2, 2)\ndef wrong():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    net, loss = model.load("my_plan_model:make")
    assert isinstance(net, nn.Linear)
    assert loss is None
    with pytest.raises(ValueError, match="not a torch"):
        model.load("my_plan_model:wrong")
