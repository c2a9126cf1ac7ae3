"""Sums of squared per-sample gradients of every kind of layer, against a loop of single-sample backward passes."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.cases import cases
from support.per_sample_cases import Twice, assert_close, every_layer, looped, loss_of, made, normal, recorded, tokens
from tersegrad.per_sample import terms

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@every_layer
@cases(loss=["sum", "mean"])
def test_as_a_loop_over_samples(layer, make, x, dim, loss):
    model = made(make)
    scale = 1.0 if loss == "sum" else 1 / x.shape[dim]
    assert_close(recorded(model, x, dim, scale), looped(model, x, dim, scale))


@every_layer
def test_any_chunks_give_the_same(layer, make, x, dim, monkeypatch):
    model = made(make)
    whole = recorded(model, x, dim)
    for workspace, cache in ((1, 1), (1000, 100)):
        with monkeypatch.context() as patch:
            patch.setattr(terms, "WORKSPACE", workspace)
            patch.setattr(terms, "CACHE", cache)
            assert_close(recorded(model, x, dim), whole)


@every_layer
def test_the_gradient_does_not_change(layer, make, x, dim):
    plain, watched = made(make), made(make)
    loss_of(plain(x), dim=dim).backward()
    recorded(watched, x, dim)
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@every_layer
def test_used_twice_is_summed_before_squaring(layer, make, x, dim):
    """A second use in the same graph: contributions of a sample are added, not their squares."""
    model = made(lambda: Twice(make()))
    assert_close(recorded(model, x, dim), looped(model, x, dim))


def test_the_naive_trick_fails_for_convolutions():
    """Squares of inputs and deltas over positions are not squares of their sums: the check above notices."""
    model, x = made(partial(nn.Conv2d, 2, 3, 3, bias=False)), normal(5, 2, 6, 6)
    output = model(x)
    (delta,) = torch.autograd.grad(loss_of(output), output)
    patches = functional.unfold(x, 3).square()
    naive = torch.einsum("bol,bkl->ok", delta.flatten(2).square(), patches).view_as(model.weight)
    with pytest.raises(AssertionError, match="weight"):
        assert_close({"weight": naive}, looped(model, x), tolerance=0.1)


def test_frequencies_of_tokens_scale_the_gradient():
    """Per sample alone the frequencies would be others, so this is compared with the rows of the whole batch."""
    x = tokens(6, 9)
    model = made(partial(nn.Embedding, 7, 4, scale_grad_by_freq=True))
    counts = torch.bincount(x.flatten(), minlength=7)
    want = looped(made(partial(nn.Embedding, 7, 4)), x)["weight"] / counts[:, None].square()
    assert_close(recorded(model, x), {"weight": want})


# --- batch norm: the stand-in


@cases(
    "norm shape",
    [
        (nn.BatchNorm1d, (6, 4)),
        (nn.BatchNorm1d, (6, 4, 5)),
        (nn.BatchNorm2d, (6, 4, 3, 5)),
        (nn.BatchNorm3d, (6, 4, 2, 3, 2)),
    ],
)
@cases(tracking=[True, False])
def test_batch_norm_has_a_stand_in(norm, shape, tracking):
    model, x = made(partial(norm, 4, track_running_stats=tracking)), 3 * normal(*shape) + 7
    output = model(x)
    (delta,) = torch.autograd.grad(loss_of(output), output)
    channel = (1, 4, *[1] * (len(shape) - 2))
    normalised = (output.detach() - model.bias.detach().view(channel)) / model.weight.detach().view(channel)
    space = tuple(range(2, len(shape)))
    weight, bias = (part.double().sum(space) if space else part.double() for part in (delta * normalised, delta))
    assert_close(recorded(model, x), {"weight": weight.square().sum(0), "bias": bias.square().sum(0)}, 1e-4)


# --- whole models
