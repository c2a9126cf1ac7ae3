"""Models whose samples cannot be told apart are refused, with the name of the module and what to do."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from support.cases import cases
from support.per_sample_cases import assert_close, looped, loss_of, made, normal, recorded, tokens
from tersegrad.per_sample import PerSample

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


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


@cases(
    "make message",
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
