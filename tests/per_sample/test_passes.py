"""What is summed in which pass: failed, repeated, checkpointed, autocast, compiled and copied ones."""

import copy
import gc
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from support.cases import cases
from support.per_sample_cases import Twice, assert_close, convolutional, looped, loss_of, made, normal, recorded
from tersegrad.per_sample import PerSample

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def test_a_forward_pass_without_backward_leaves_nothing():
    model = made(convolutional)
    recorder = PerSample(model)
    x = normal(6, 3, 4, 4)
    inputs = []
    handle = model[4].register_forward_hook(
        lambda module, args, output: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    gc.disable()
    try:
        output = model(x)
        assert not inputs[0].expired()
        del output
        assert inputs[0].expired()
    finally:
        gc.enable()
    handle.remove()
    loss_of(model(x)).backward()
    assert not recorder._passes
    recorder.close()
    assert_close({n: recorder.of(p) for n, p in model.named_parameters()}, looped(model, x))


def test_after_backward_the_inputs_are_gone():
    """Even while the loss, and with it the graph, is still there."""
    model = made(convolutional)
    PerSample(model)
    inputs = []
    model[4].register_forward_hook(
        lambda module, args, output: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    loss = loss_of(model(normal(6, 3, 4, 4)))
    loss.backward()
    assert inputs[0].expired()


@cases(seed=range(5))
def test_a_gradient_that_is_nothing_but_rounding(seed):
    """A bias in front of a norm has no effect. What arrives is rounding, and must not be taken for a missed use."""
    model = made(lambda: nn.Sequential(nn.Conv2d(4, 8, 3, stride=2), nn.InstanceNorm2d(8, affine=True)))
    recorder = PerSample(model)
    loss_of(model(normal(6, 4, 9, 9, seed=seed))).backward()
    assert float(model[0].bias.grad.norm()) < 1e-4
    assert float(recorder.of(model[0].weight).norm()) > 0.1


def test_a_use_without_gradient_does_not_count():
    model, x = made(partial(nn.Linear, 5, 5)), normal(6, 5)
    want = looped(model, x)
    recorder = PerSample(model)
    unused = model(model(x))
    loss_of(model(x)).backward()
    assert_close({n: recorder.of(p) for n, p in model.named_parameters()}, want)
    del unused


def test_no_gradients_no_uses():
    model, x = made(partial(nn.Linear, 5, 4)), normal(6, 5)
    recorder = PerSample(model)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert not recorder.of(model.weight).any()


def test_gradients_that_are_not_accumulated_do_not_count():
    model, x = made(convolutional), normal(6, 3, 4, 4)
    want = looped(model, x)
    recorder = PerSample(model)
    loss = loss_of(model(x))
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert not any(recorder.of(p).any() for p in model.parameters())
    assert not recorder._passes
    loss.backward()
    assert_close({n: recorder.of(p) for n, p in model.named_parameters()}, want)


def test_a_second_backward_through_the_same_graph_is_refused():
    model = made(convolutional)
    PerSample(model)
    loss = loss_of(model(normal(6, 3, 4, 4)))
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match=r"6: a second backward pass through the same graph .*Add the losses"):
        loss.backward()


@cases(reentrant=[True, False])
def test_checkpointing(reentrant):
    model, x = made(convolutional), normal(6, 3, 4, 4)
    want = looped(model, x)
    recorder = PerSample(model)
    x.requires_grad_()
    middle = checkpoint(model[:4], x, use_reentrant=reentrant)
    loss_of(checkpoint(model[4:], middle, use_reentrant=reentrant)).backward()
    assert_close({n: recorder.of(p) for n, p in model.named_parameters()}, want)


def test_checkpointing_still_saves_memory():
    model = made(convolutional)
    PerSample(model)
    inputs = []
    model[4].register_forward_hook(
        lambda module, args, output: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    output = checkpoint(model, normal(6, 3, 4, 4), use_reentrant=False)
    assert inputs[0].expired()
    loss_of(output).backward()
    assert len(inputs) == 2


def test_a_pass_that_failed_is_forgotten_by_clear():
    model, x = made(convolutional), normal(6, 3, 4, 4)
    want = looped(model, x)
    recorder = PerSample(model)
    middle = model[:3](x)
    middle.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model[3:](middle)).backward()
    recorder.clear()
    assert not recorder._passes
    loss_of(model(x)).backward()
    assert_close({n: recorder.of(p) for n, p in model.named_parameters()}, want)


@cases(dtype=[torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Squares are computed in float32, even if backward itself runs under autocast."""
    x, squares = normal(6, 3, 5), {}
    for inside in (True, False):
        model = made(lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), Twice(nn.Linear(8, 4))))
        recorder = PerSample(model)
        with torch.autocast("cpu", dtype):
            loss = loss_of(model(x))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        recorder.close()
        squares[inside] = {n: recorder.of(p) for n, p in model.named_parameters()}
    assert_close(squares[False], looped(model, x), tolerance=0.05)
    assert_close(squares[True], squares[False], tolerance=1e-6)


@cases(dtype=[torch.bfloat16, torch.float64])
def test_parameters_of_another_type(dtype):
    model, x = made(convolutional).to(dtype), normal(6, 3, 4, 4).to(dtype)
    assert_close(recorded(model, x), looped(model, x), tolerance=0.05 if dtype == torch.bfloat16 else 1e-5)


def test_nothing_finite_is_not_an_error():
    model, x = made(convolutional), normal(6, 3, 4, 4)
    recorder = PerSample(model)
    loss_of(model(x * float("inf"))).backward()
    assert all(not p.isfinite().all() for p in (recorder.of(model[0].weight), recorder.of(model[6].weight)))


def test_frozen_parameters_cost_nothing():
    model, x = made(convolutional), normal(6, 3, 4, 4)
    model[0].requires_grad_(False)
    model[4].weight.requires_grad_(False)
    want = looped(model, x)
    recorder = PerSample(model)
    inputs = []
    model[4].register_forward_hook(
        lambda module, args, output: inputs.append(StorageWeakRef(args[0].untyped_storage()))
    )
    loss = loss_of(model(x))
    assert inputs[0].expired()  # a bias alone needs no input
    loss.backward()
    assert not model[0]._forward_hooks
    assert_close({n: recorder.of(p) for n, p in model.named_parameters() if p.requires_grad}, want)
    with pytest.raises(ValueError, match="frozen when this PerSample was made"):
        recorder.of(model[0].weight)


def test_a_copy_of_the_model_is_not_recorded(tmp_path):
    model, x = made(lambda: nn.Sequential(nn.LSTM(3, 4, batch_first=True))), normal(5, 6, 3)
    recorder = PerSample(model)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        loss_of(other(x)).backward()
        assert not any(recorder.of(p).any() for p in model.parameters())
    loss_of(model(x)).backward()
    assert all(recorder.of(p).any() for p in model.parameters())


@pytest.mark.filterwarnings("ignore")  # which the compiler raises inside of itself
@cases(before=[True, False])
def test_compiled_models(before, caplog):
    """Hooks that are there when the model first runs are compiled with it; later ones are not, which is noticed."""
    caplog.clear()
    torch._dynamo.reset()
    model, x = made(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))), normal(6, 5)
    want = looped(model, x)
    compiled = torch.compile(model, backend="eager")
    if not before:
        compiled(x)
    recorder = PerSample(model)
    loss = loss_of(compiled(x))
    if before:
        loss.backward()
        assert_close({n: recorder.of(p) for n, p in model.named_parameters()}, want)
    else:
        loss.backward()
        (said,) = [r.getMessage() for r in caplog.records if r.name == "tersegrad"]
        assert re.match("2.bias, 2.weight, 0.bias, 0.weight: .* compiled and run before this was attached", said)
        assert_close(
            {n: recorder.of(p) for n, p in model.named_parameters()},
            {n: p.grad.square() for n, p in model.named_parameters()},
        )
