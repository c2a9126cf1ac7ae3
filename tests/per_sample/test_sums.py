"""Where sums are kept and moved to; and the squares of whole backward passes."""

from functools import partial

import pytest
import torch
from torch import nn

from support.cases import cases
from support.per_sample_cases import Tied, assert_close, convolutional, loss_of, made, normal, tokens
from tersegrad.per_sample import PerBackward, PerSample

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.fixture(params=[PerSample, PerBackward])
def recorder_of(request):
    return request.param


def test_place_moves_what_is_summed(recorder_of):
    model, x = made(convolutional), normal(6, 3, 4, 4)
    recorder = recorder_of(model)
    loss_of(model(x)).backward()
    once = {p: recorder.of(p).clone() for p in model.parameters()}
    parameters = list(model.parameters())[::-1]
    vector = torch.full((sum(p.numel() for p in parameters),), 7.0)
    recorder.place(parameters, vector)
    assert torch.equal(vector, torch.cat([once[p].flatten() for p in parameters]))
    loss_of(model(x)).backward()
    torch.testing.assert_close(vector, torch.cat([2 * once[p].flatten() for p in parameters]))
    recorder.place(parameters[::-1], vector)  # in another order, in the same memory
    torch.testing.assert_close(vector, torch.cat([2 * once[p].flatten() for p in parameters[::-1]]))
    assert all(recorder.of(p).shape == p.shape for p in parameters)
    recorder.clear()
    assert not vector.any()
    assert not vector.any()
    recorder.close()
    loss_of(model(x)).backward()
    assert not vector.any()


def test_place_keeps_the_order_in_which_ddp_lays_channels_last(recorder_of):
    model, x = made(convolutional), normal(6, 3, 4, 4)
    recorder = recorder_of(model)
    loss_of(model(x)).backward()
    usual = {name: recorder.of(p).clone() for name, p in model.named_parameters()}
    recorder.close()
    model.to(memory_format=torch.channels_last)
    recorder = recorder_of(model)
    vector = torch.zeros(sum(p.numel() for p in model.parameters()))
    recorder.place(list(model.parameters()), vector)
    loss_of(model(x)).backward()
    at, crooked = 0, 0
    for name, p in model.named_parameters():
        torch.testing.assert_close(vector[at : at + p.numel()].as_strided(p.shape, p.stride()), usual[name])
        at, crooked = at + p.numel(), crooked + (not p.is_contiguous())
    assert crooked


@cases(flat=[torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(2, 3), torch.zeros(12)[::2]])
def test_place_needs_a_vector_that_fits(recorder_of, flat):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="contiguous vector of 6 float32"):
        recorder_of(model).place(list(model.parameters()), flat)


def test_sums_of_an_unknown_parameter(recorder_of):
    with pytest.raises(ValueError, match="not in the module"):
        recorder_of(nn.Linear(2, 2)).of(torch.zeros(3))


def test_closing_in_the_middle(recorder_of):
    model = made(convolutional)
    recorder = recorder_of(model)
    loss = loss_of(model(normal(6, 3, 4, 4)))
    recorder.close()
    loss.backward()
    assert not any(recorder.of(p).any() for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


# --- every backward pass as one sample


def test_per_backward_squares_the_gradient_of_each_pass():
    model = nn.MultiheadAttention(4, 2)
    recorder = PerBackward(model)
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for seed in range(3):
        x = normal(5, 3, 4, seed=seed)
        before = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        model(x, x, x)[0].square().sum().backward()
        for name, p in model.named_parameters():
            want[name] += (p.grad if before[name] is None else p.grad - before[name]).square()
    assert_close({n: recorder.of(p) for n, p in model.named_parameters()}, want, tolerance=1e-4)


def test_per_backward_sums_tied_uses_before_squaring():
    model = made(Tied)
    recorder = PerBackward(model)
    loss_of(model(tokens(6, 9))).backward()
    assert_close(
        {n: recorder.of(p) for n, p in model.named_parameters()},
        {n: p.grad.square() for n, p in model.named_parameters()},
    )


def test_per_backward_refuses_sparse_gradients():
    model = nn.Embedding(7, 4, sparse=True)
    PerBackward(model)
    with pytest.raises(ValueError, match="The gradient of weight is sparse"):
        model(tokens(6, 9)).sum().backward()


def test_per_backward_in_bfloat16():
    model = made(partial(nn.Linear, 5, 4)).bfloat16()
    recorder = PerBackward(model)
    loss_of(model(normal(6, 5).bfloat16())).backward()
    assert torch.equal(recorder.of(model.weight), model.weight.grad.float().square())


# --- an oracle that was not written here
