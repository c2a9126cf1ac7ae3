"""Whole models: tied, residual, recurrent and textual ones, against a loop over samples and against Opacus."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.cases import cases
from support.per_sample_cases import Tied, assert_close, convolutional, looped, loss_of, made, normal, recorded, tokens
from tersegrad.per_sample import PerSample

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


class Residual(nn.Module):
    """Changes the outputs of its layers in place."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Conv1d(5, 5, 3, padding=1)

    def forward(self, x):
        y = self.one(x)
        y += x
        z = self.two(y.transpose(1, 2))
        z *= 3
        return z.relu_().sum(2)


MODELS = {
    "in place": (convolutional, normal(6, 3, 4, 4)),
    "in place on views": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(True), nn.Linear(4, 2)), normal(6, 5, 3)),
    "residual": (Residual, normal(6, 4, 5)),
    "tied": (Tied, tokens(6, 9)),
    "called twice": (lambda: (lambda layer: nn.Sequential(layer, nn.Tanh(), layer))(nn.Linear(3, 3)), normal(6, 2, 3)),
}
every_model = cases("make x", MODELS.values())


@every_model
@cases(passes=[1, 3])
def test_models(make, x, passes):
    model = made(make)
    want = {name: passes * squares for name, squares in looped(model, x, scale=0.1).items()}
    assert_close(recorded(model, x, scale=0.1, passes=passes), want)


def test_a_ragged_last_batch():
    model = made(convolutional)
    recorder = PerSample(model)
    want = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for size in (6, 6, 1, 0):
        x = normal(size, 3, 4, 4, seed=size)
        scale = 1 / max(1, size)
        for name, squares in looped_without_hooks(model, x, scale).items():
            want[name] += squares
        (scale * loss_of(model(x))).backward()
    assert_close({name: recorder.of(p) for name, p in model.named_parameters()}, want)


def looped_without_hooks(model, x, scale):
    fresh = convolutional()
    fresh.load_state_dict(model.state_dict())
    return looped(fresh, x, scale=scale)


def test_subclasses_that_add_nothing_are_known():
    class Mine(nn.Linear):
        def __init__(self):
            super().__init__(5, 4)

    model, x = made(Mine), normal(6, 5)
    assert_close(recorded(model, x), looped(model, x))


def test_inputs_by_name():
    model, x = made(partial(nn.Linear, 5, 4)), normal(6, 5)
    recorder = PerSample(model)
    loss_of(model(input=x)).backward()
    recorder.close()
    assert_close({name: recorder.of(p) for name, p in model.named_parameters()}, looped(model, x))


@cases(kind=[nn.RNN, nn.LSTM, nn.GRU])
@cases(by_name=[True, False])
def test_recurrent_layers_with_an_initial_state(kind, by_name):
    model, x = made(partial(kind, 3, 4, num_layers=2, batch_first=True)), normal(5, 6, 3)
    state = normal(2, 5, 4, seed=1)
    state = (state, normal(2, 5, 4, seed=2)) if kind is nn.LSTM else state
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(5):
        now = slice(i, i + 1)
        own = tuple(s[:, now] for s in state) if isinstance(state, tuple) else state[:, now]
        parts = torch.autograd.grad(loss_of(model(x[now], own), now), list(model.parameters()))
        for squares, part in zip(want.values(), parts, strict=True):
            squares += part.square()
    recorder = PerSample(model)
    loss_of(model(x, hx=state) if by_name else model(x, state)).backward()
    assert_close({name: recorder.of(p) for name, p in model.named_parameters()}, want)


def test_only_the_final_state_of_a_recurrent_layer_is_used():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)

        def forward(self, x):
            return self.lstm(x)[1][1].transpose(0, 1)

    model, x = made(Last), normal(5, 6, 3)
    assert_close(recorded(model, x), looped(model, x))


@cases(kind=[nn.RNN, nn.LSTM, nn.GRU])
@cases(batch_first=[True, False])
def test_dropout_between_recurrent_layers_is_replayed(kind, batch_first):
    """Two layers with dropout in one module are two modules with the same dropout between them."""
    torch.manual_seed(0)
    model = kind(3, 4, 2, dropout=0.5, batch_first=batch_first)
    x = normal(5, 6, 3)
    recorder = PerSample(model)
    torch.manual_seed(1)
    output, _ = model(x if batch_first else x.transpose(0, 1))
    torch.rand(1)
    after = torch.get_rng_state()
    loss_of(output, dim=0 if batch_first else 1).backward()
    assert torch.equal(torch.get_rng_state(), after)
    first, second = (kind(size, 4, batch_first=True).double() for size in (3, 4))
    for number, layer in enumerate((first, second)):
        layer.load_state_dict(
            {name[:-1] + "0": p for name, p in model.state_dict().items() if name.endswith(str(number))}
        )
    torch.manual_seed(1)
    kept = functional.dropout(torch.ones(6, 5, 4), 0.5).transpose(0, 1).double()  # as torch draws it: time first
    squares = {name: 0.0 for name, _ in model.named_parameters()}
    for i in range(5):
        now = slice(i, i + 1)
        first.zero_grad()
        second.zero_grad()
        out = second(kept[now] * first(x[now].double())[0])[0]
        dim = 0 if batch_first else 1
        loss_of(out if batch_first else out.transpose(0, 1), now, dim).backward()
        for number, layer in enumerate((first, second)):
            for name, p in layer.named_parameters():
                squares[name[:-1] + str(number)] += p.grad.square()
    assert_close({name: recorder.of(p) for name, p in model.named_parameters()}, squares)


def test_unbatched_inputs_are_one_sample():
    for make, x in [
        (partial(nn.Linear, 5, 4), normal(5)),
        (partial(nn.Conv2d, 2, 3, 3), normal(2, 5, 5)),
        (partial(nn.LSTM, 3, 4, 2), normal(6, 3)),
        (partial(nn.LayerNorm, (3, 5)), normal(3, 5)),
    ]:
        model = made(make)
        recorder = PerSample(model)
        output = model(x)
        (output if isinstance(output, torch.Tensor) else output[0]).square().sum().backward()
        for p in model.parameters():
            torch.testing.assert_close(recorder.of(p), p.grad.square(), rtol=1e-4, atol=1e-6)


# --- what autograd can do to it


def grouped():
    return nn.Sequential(nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.InstanceNorm2d(8, affine=True))


def one_and_three_dimensional():
    return nn.Sequential(
        nn.Conv1d(4, 6, 3, padding=2, dilation=2), nn.Unflatten(2, (1, 2, 4)), nn.Conv3d(6, 2, (1, 2, 2))
    )


def textual():
    return nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 5))


@pytest.mark.filterwarnings("ignore")
@cases(
    "make x",
    [
        (convolutional, normal(6, 3, 4, 4)),
        (textual, tokens(6, 9)),
        (grouped, normal(6, 4, 9, 9)),
        (one_and_three_dimensional, normal(5, 4, 8)),
    ],
)
def test_as_opacus(make, x):
    grad_sample = pytest.importorskip("opacus.grad_sample")
    model = made(make)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # its hooks cannot bear it
    got = recorded(model, x, scale=1 / len(x))
    model.zero_grad()
    theirs = grad_sample.GradSampleModule(model, loss_reduction="sum")
    (loss_of(theirs(x)) / len(x)).backward()
    assert_close(got, {name: p.grad_sample.square().sum(0) for name, p in model.named_parameters()})
