"""Layers and inputs for the tests of per-sample squares, and the loop over samples that they are compared with."""

import copy
from functools import partial

import torch
from torch import nn

from support.cases import cases
from tersegrad.per_sample import PerSample


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


def layers():
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


LAYERS = list(layers())
every_layer = cases("layer make x dim", LAYERS)


def made(make, seed=0):
    torch.manual_seed(seed)
    model = make()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model


class Twice(nn.Module):
    """A layer called on two different inputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        other = 2 * x + 1 if x.is_floating_point() else (x + 1) % 7
        one, two = self.layer(x), self.layer(other)
        return one + two.square() if isinstance(one, torch.Tensor) else one[0] + two[0].square()


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
