"""Sums of squared per-sample gradients, against a loop of single-sample backward passes and against Opacus."""

import copy
import gc
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tersegrad.per_sample import PerBackward, PerSample, terms
from tersegrad.per_sample.layers import Use
from tersegrad.per_sample.scan import scan

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape, words=7):
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(0))


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


def loss_of(output, samples=slice(None), dim=0):
    """A sum over samples in which every output of a sample has a weight of its own."""
    outputs = [output] if isinstance(output, torch.Tensor) else list(flat(output))
    total = 0
    for i, y in enumerate(outputs):
        axis = 1 if i else dim  # the final states of a recurrent layer: samples are always second
        total = total + (y * weights(y.shape, axis, samples, i).to(y.dtype)).sum()
    return total


def flat(output):
    for part in output:
        yield from flat(part) if isinstance(part, tuple) else [part]


def weights(shape, axis, samples, seed):
    size = list(shape)
    size[axis] = 50
    return normal(*size, seed=seed + 10).index_select(axis, torch.arange(50)[samples][: shape[axis]])


def looped(model, x, dim=0, scale=1.0):
    """The definition: one backward pass for each sample, in float64."""
    model = copy.deepcopy(model).double()
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    for sample in range(x.shape[dim]):
        model.zero_grad()
        alone = x.narrow(dim, sample, 1)
        output = model(alone.double() if x.is_floating_point() else alone)
        (scale * loss_of(output, slice(sample, sample + 1), dim)).backward()
        for name, p in model.named_parameters():
            if p.requires_grad and p.grad is not None:
                squares[name] += p.grad.square()
    return squares


def recorded(model, x, dim=0, scale=1.0, passes=1, **options):
    """The same by hooks, and the ordinary gradients."""
    recorder = PerSample(model, batch_dim=dim, **options)
    for _ in range(passes):
        (scale * loss_of(model(x), dim=dim)).backward()
    squares = {name: recorder.of(p).clone() for name, p in model.named_parameters() if p.requires_grad}
    recorder.close()
    return squares


def assert_close(got, want, tolerance=1e-5):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape
        assert got[name].dtype == torch.float32
        error = (got[name].double() - want[name].double()).abs().max()
        assert error <= tolerance * want[name].abs().max() + 1e-30, name


CONVOLUTIONS = [
    {},
    {"bias": False},
    {"padding": 1},
    {"padding": (0, 2), "stride": (2, 1)},
    {"stride": 3},
    {"dilation": 2, "padding": "same"},
    {"padding": "valid"},
    {"groups": 2},
    {"groups": 4, "padding": 1},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": (1, 2), "padding_mode": "circular"},
    {"padding": 1, "padding_mode": "replicate", "stride": 2},
    {"padding": "same", "padding_mode": "reflect", "groups": 2},
]
TRANSPOSED = [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2, "stride": 2}, {"dilation": 2}]
RECURRENT = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "bias": False},
]


def cases():
    """(name, maker of a layer, input, dimension of the samples)."""
    linear = partial(nn.Linear, 5, 4)
    yield "linear", linear, normal(6, 5), 0
    yield "linear without bias", partial(linear, bias=False), normal(6, 5), 0
    yield "linear on one sample", linear, normal(1, 5), 0
    yield "linear on a sequence", linear, normal(6, 3, 5), 0
    yield "linear on a sequence of one", linear, normal(6, 1, 5), 0
    yield "linear on a grid", linear, normal(6, 3, 2, 5), 0
    yield "linear, time first", linear, normal(3, 6, 5), 1
    yield "linear, one batch dimension, time first elsewhere", linear, normal(6, 5), 0
    yield "wide linear on a sequence", partial(nn.Linear, 200, 3), normal(6, 4, 200), 0
    yield "narrow linear on a sequence", partial(nn.Linear, 3, 200), normal(6, 4, 3), 0
    for how in (torch.Tensor.contiguous, channels_last):
        name = "" if how is torch.Tensor.contiguous else ", channels last"
        for options in CONVOLUTIONS:
            yield f"conv2d {options}{name}", partial(nn.Conv2d, 4, 8, 3, **options), how(normal(5, 4, 9, 8)), 0
        yield f"conv2d 1x1{name}", partial(nn.Conv2d, 4, 8, 1), how(normal(5, 4, 9, 8)), 0
        yield f"conv2d 2x3 same{name}", partial(nn.Conv2d, 4, 6, (2, 3), padding="same"), how(normal(5, 4, 9, 8)), 0
        yield f"conv2d of everything{name}", partial(nn.Conv2d, 4, 8, (9, 8)), how(normal(5, 4, 9, 8)), 0
        yield f"conv2d of one channel{name}", partial(nn.Conv2d, 1, 16, 3), how(normal(5, 1, 9, 8)), 0
        yield f"depthwise conv2d{name}", partial(nn.Conv2d, 4, 4, 3, groups=4), how(normal(5, 4, 9, 8)), 0
        for options in TRANSPOSED:
            make = partial(nn.ConvTranspose2d, 4, 6, 3, **options)
            yield f"transposed conv2d {options}{name}", make, how(normal(5, 4, 5, 6)), 0
    yield "conv1d", partial(nn.Conv1d, 4, 6, 3, padding=1, stride=2), normal(5, 4, 11), 0
    yield "conv3d", partial(nn.Conv3d, 2, 3, (2, 3, 2), padding=(0, 1, 1)), normal(4, 2, 5, 6, 4), 0
    yield "transposed conv1d", partial(nn.ConvTranspose1d, 4, 6, 3), normal(5, 4, 7), 0
    yield "transposed conv3d", partial(nn.ConvTranspose3d, 2, 4, 2, stride=2, groups=2), normal(3, 2, 3, 2, 3), 0
    yield "embedding", partial(nn.Embedding, 7, 4), tokens(6, 9), 0
    yield "embedding with padding", partial(nn.Embedding, 7, 4, padding_idx=-2), tokens(6, 9), 0
    yield "embedding of single tokens", partial(nn.Embedding, 7, 4), tokens(6), 0
    yield "embedding of a grid", partial(nn.Embedding, 7, 4), tokens(6, 3, 2), 0
    yield "embedding of int32", partial(nn.Embedding, 7, 4), tokens(6, 9).int(), 0
    yield "embedding, time first", partial(nn.Embedding, 7, 4), tokens(9, 6), 1
    yield "layer norm", partial(nn.LayerNorm, 5), normal(6, 5), 0
    yield "layer norm on a sequence", partial(nn.LayerNorm, 5), normal(6, 3, 5), 0
    yield "layer norm over two dimensions", partial(nn.LayerNorm, (3, 5)), normal(6, 2, 3, 5), 0
    yield "layer norm, time first", partial(nn.LayerNorm, 5), normal(4, 6, 5), 1
    yield "layer norm without bias", partial(nn.LayerNorm, 5, bias=False), normal(6, 3, 5), 0
    yield "rms norm", partial(nn.RMSNorm, 5, eps=1e-3), normal(6, 3, 5), 0
    yield "group norm", partial(nn.GroupNorm, 2, 4), normal(5, 4, 3, 3), 0
    yield "group norm on vectors", partial(nn.GroupNorm, 2, 4), normal(5, 4), 0
    yield "instance norm 1d", partial(nn.InstanceNorm1d, 4, affine=True), normal(5, 4, 7), 0
    yield (
        "instance norm 2d",
        partial(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True),
        normal(5, 4, 3, 3),
        0,
    )
    yield "instance norm 3d", partial(nn.InstanceNorm3d, 2, affine=True), normal(5, 2, 3, 3, 2), 0
    yield "instance norm, evaluated", lambda: measured(nn.InstanceNorm1d(4, 0.1, 0.1, True, True)), normal(5, 4, 3), 0
    yield "batch norm, evaluated", lambda: measured(nn.BatchNorm2d(4)), normal(5, 4, 3, 3), 0
    yield "prelu", nn.PReLU, normal(5, 4, 3), 0
    yield "prelu per channel", partial(nn.PReLU, 4), normal(5, 4, 3), 0
    yield "prelu of vectors", partial(nn.PReLU, 4), normal(5, 4), 0
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        for options in RECURRENT:
            yield f"{kind.__name__} {options}", partial(kind, 3, 4, batch_first=True, **options), normal(5, 6, 3), 0
        yield f"{kind.__name__}, time first", partial(kind, 3, 4), normal(6, 5, 3), 1
    yield "RNN relu", partial(nn.RNN, 3, 4, nonlinearity="relu", batch_first=True), normal(5, 6, 3), 0


def measured(norm):
    norm.running_mean.copy_(normal(norm.num_features))
    norm.running_var.copy_(normal(norm.num_features).square() + 0.5)
    return norm.eval()


CASES = list(cases())
every_case = pytest.mark.parametrize(
    ("make", "x", "dim"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)


def made(make, seed=0):
    torch.manual_seed(seed)
    model = make()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model


@every_case
@pytest.mark.parametrize("loss", ["sum", "mean"])
def test_as_a_loop_over_samples(make, x, dim, loss):
    model = made(make)
    scale = 1.0 if loss == "sum" else 1 / x.shape[dim]
    assert_close(recorded(model, x, dim, scale), looped(model, x, dim, scale))


@every_case
def test_any_chunks_give_the_same(make, x, dim, monkeypatch):
    model = made(make)
    whole = recorded(model, x, dim)
    monkeypatch.setattr(terms, "ROOM", 1)
    monkeypatch.setattr(terms, "CACHE", 1)
    assert_close(recorded(model, x, dim), whole)
    monkeypatch.setattr(terms, "ROOM", 1000)
    monkeypatch.setattr(terms, "CACHE", 100)
    assert_close(recorded(model, x, dim), whole)


@every_case
def test_the_gradient_does_not_change(make, x, dim):
    plain, watched = made(make), made(make)
    loss_of(plain(x), dim=dim).backward()
    recorded(watched, x, dim)
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@every_case
def test_used_twice_is_summed_before_squaring(make, x, dim):
    """A second use in the same graph: contributions of a sample are added, not their squares."""
    model = made(lambda: Twice(make()))
    assert_close(recorded(model, x, dim), looped(model, x, dim))


class Twice(nn.Module):
    """A layer called on two different inputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        other = 2 * x + 1 if x.is_floating_point() else (x + 1) % 7
        one, two = self.layer(x), self.layer(other)
        return one + two.square() if isinstance(one, torch.Tensor) else one[0] + two[0].square()


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


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d, (6, 4)),
        (nn.BatchNorm1d, (6, 4, 5)),
        (nn.BatchNorm2d, (6, 4, 3, 5)),
        (nn.BatchNorm3d, (6, 4, 2, 3, 2)),
    ],
)
@pytest.mark.parametrize("tracking", [True, False])
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


def convolutional():
    return nn.Sequential(
        *[nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.Flatten()],
        *[nn.Linear(16, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)],
    )


class Tied(nn.Module):
    """A language model whose decoder shares the table of the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=3)
        self.mix = nn.GRU(4, 4, batch_first=True)
        self.scores = nn.Linear(4, 7)
        self.scores.weight = self.embed.weight

    def forward(self, x):
        return self.scores(self.mix(self.embed(x))[0])


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
every_model = pytest.mark.parametrize(("make", "x"), MODELS.values(), ids=MODELS.keys())


@every_model
@pytest.mark.parametrize("passes", [1, 3])
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


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("by_name", [True, False])
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


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("batch_first", [True, False])
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


@pytest.mark.parametrize("seed", range(5))
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


@pytest.mark.parametrize("reentrant", [True, False])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
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
@pytest.mark.parametrize("before", [True, False])
def test_compiled_models(before):
    """Hooks that are there when the model first runs are compiled with it; later ones are not, which is noticed."""
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
        with pytest.raises(ValueError, match="compiled and run before PerSample was made"):
            loss.backward()


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


@pytest.mark.parametrize(("make", "x"), LARGE.values(), ids=LARGE.keys())
def test_the_workspace_is_bounded(make, x, monkeypatch):
    """However many samples there are."""
    room = 1 << 12
    monkeypatch.setattr(terms, "ROOM", room)
    monkeypatch.setattr(terms, "CACHE", room // 4)
    model = made(make)
    (found,) = scan(model)
    y = model(x).detach()
    for name in found.parameters:
        term = found.layer.term(Use(model, True, 0, (x,), (y,)), name)
        sums = torch.zeros_like(getattr(model, name).detach())
        most = 4 * max(room, term.room)
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


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.zeros(3))


class Overridden(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


def patched():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Parameters, r"the model itself \(Parameters\): no known layer, but it owns shift"),
        (lambda: nn.Sequential(nn.ReLU(), Parameters()), r"  1 \(Parameters\)"),
        (lambda: nn.MultiheadAttention(4, 2), r"MultiheadAttention\): no known layer, but it owns in_proj_weight"),
        (lambda: nn.Sequential(Overridden(3, 3)), r"0 \(Overridden\): no known layer"),
        (lambda: nn.Sequential(patched()), r"0 \(Linear\): no known layer"),
        (lambda: nn.LSTMCell(3, 3), "LSTMCell"),
        (lambda: nn.EmbeddingBag(3, 3), "EmbeddingBag"),
        (lambda: nn.Embedding(3, 3, sparse=True), "its gradient is sparse; make it with sparse=False"),
        (lambda: nn.LSTM(3, 4, proj_size=2), "it has a proj_size"),
        (lambda: nn.LazyLinear(3), "run one batch through the model first"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "parametrizations.weight"),
    ],
)
def test_unknown_modules_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message) as error:
        PerSample(make())
    assert 'VGC(..., squares="microbatch")' in str(error.value)


def test_frozen_parameters_are_nobody_s_business():
    model = Parameters()
    model.shift.requires_grad_(False)
    PerSample(model)


class Functional(nn.Module):
    """Uses a layer's weight through a function, with or without calling the layer too."""

    def __init__(self, call):
        super().__init__()
        self.call, self.embed = call, nn.Embedding(7, 4)

    def forward(self, x):
        inside = self.embed(x) if self.call else functional.one_hot(x, 7).float() @ self.embed.weight
        return functional.linear(inside.tanh(), self.embed.weight)


def test_a_weight_that_only_functions_use_is_refused():
    model = made(partial(Functional, False))
    PerSample(model)
    with pytest.raises(ValueError, match=r"embed.weight received a gradient, but none of it through a call"):
        loss_of(model(tokens(6, 9))).backward()


def test_a_weight_that_a_function_also_uses_is_refused():
    model = made(partial(Functional, True))
    PerSample(model)
    with pytest.raises(ValueError, match=r"embed.weight: what .* does not add up to its gradient"):
        loss_of(model(tokens(6, 9))).backward()


def test_samples_must_be_the_same_everywhere():
    class Positions(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared, self.words, self.positions = shared, nn.Embedding(7, 4), nn.Embedding(9, 4)

        def forward(self, x):
            at = torch.arange(x.shape[1])
            return self.words(x) + self.positions(at if self.shared else at.expand(len(x), -1))

    model, x = made(partial(Positions, True)), tokens(6, 9)
    PerSample(model)
    with pytest.raises(ValueError, match=r"sees 9 samples, and words sees 6 .*|sees 6 samples, and positions sees 9 "):
        loss_of(model(x)).backward()
    model = made(partial(Positions, False))
    assert_close(recorded(model, x), looped(model, x))


def test_packed_sequences_are_refused():
    model = nn.LSTM(3, 4)
    PerSample(model)
    with pytest.raises(ValueError, match="need a padded batch, and this is a PackedSequence"):
        model(nn.utils.rnn.pack_sequence([normal(4, 3), normal(2, 3)]))


def test_batch_dim_is_the_first_or_the_second():
    with pytest.raises(ValueError, match=r"PerSample\(batch_dim=2\)"):
        PerSample(nn.Linear(2, 2), batch_dim=2)


# --- where the sums live


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


@pytest.mark.parametrize(
    "flat", [torch.zeros(5), torch.zeros(6, dtype=torch.float64), torch.zeros(2, 3), torch.zeros(12)[::2]]
)
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


def grouped():
    return nn.Sequential(nn.Conv2d(4, 8, 3, groups=2, stride=2), nn.InstanceNorm2d(8, affine=True))


def one_and_three_dimensional():
    return nn.Sequential(
        nn.Conv1d(4, 6, 3, padding=2, dilation=2), nn.Unflatten(2, (1, 2, 4)), nn.Conv3d(6, 2, (1, 2, 2))
    )


def textual():
    return nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 5))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "x"),
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
