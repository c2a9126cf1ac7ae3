"""Squares of some samples: right on average over all choices, the same in the same pass, all where that is cheap."""

from functools import partial

import pytest
import torch
from torch import nn

from support.cases import cases
from support.per_sample_cases import assert_close, every_layer, loss_of, made, normal
from tersegrad.per_sample import PerSample, terms
from tersegrad.per_sample.layers import Use
from tersegrad.per_sample.scan import scan

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@every_layer
def test_the_mean_over_all_choices_is_exact(layer, make, x, dim, monkeypatch):
    monkeypatch.setattr(terms, "SHARE", 3)
    monkeypatch.setattr(terms, "LEAST", 1)
    model = made(make)
    (found,), _ = scan(model)
    output = model(x)
    outputs = found.layer.outputs(output)
    deltas = torch.autograd.grad(loss_of(output, dim=dim), outputs, allow_unused=True)
    use = Use(model, True, dim, (x.detach(),), deltas, found.layer.before(model))
    for name in found.parameters:
        term = found.layer.term(use, name)
        exact, mean = (torch.zeros(getattr(model, name).shape) for _ in range(2))
        term.add_squares(exact)
        for start in range(term.samples):
            term.add_estimate(mean, start)
        assert_close({name: mean / term.samples}, {name: exact}, tolerance=1e-4)


def test_a_dense_layer_on_vectors_looks_at_all_samples():
    model, x = made(partial(nn.Linear, 5, 4)), normal(64, 5)
    (found,), _ = scan(model)
    term = found.layer.term(Use(model, True, 0, (x,), (model(x).detach(),)), "weight")
    exact, estimate = torch.zeros(4, 5), torch.zeros(4, 5)
    term.add_squares(exact)
    term.add_estimate(estimate, 7)
    assert torch.equal(exact, estimate)


def model_of():
    return nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())


def recorded(model, batches, **how):
    recorder = PerSample(model, **how)
    for x in batches:
        loss_of(model(x)).backward()
    return [recorder.of(p).clone() for p in model.parameters()]


def test_the_same_pass_gives_the_same_squares_whatever_came_before():
    x, other = normal(40, 2, 8, 8), normal(40, 2, 8, 8, seed=1)
    alone = recorded(made(model_of), [x], sampled=True)
    model = made(model_of)
    recorder = PerSample(model, sampled=True)
    loss_of(model(other)).backward()
    torch.rand(3)
    recorder.clear()
    model.load_state_dict(made(model_of).state_dict())
    loss_of(model(x)).backward()
    for mine, want in zip((recorder.of(p) for p in model.parameters()), alone, strict=True):
        assert torch.equal(mine, want)


@cases(samples=[40, 37])
def test_estimates_are_close_to_exact_squares_after_many_passes(samples):
    batches = [normal(samples, 2, 8, 8, seed=i) for i in range(60)]
    estimated = recorded(made(model_of), batches, sampled=True)
    exact = recorded(made(model_of), batches)
    for mine, want in zip(estimated, exact, strict=True):
        assert 0.9 < float(mine.sum() / want.sum()) < 1.1
        assert not torch.equal(mine, want)
