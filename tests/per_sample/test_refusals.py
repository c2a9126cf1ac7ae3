"""Parameters whose samples cannot be told apart are named once; for them a whole backward pass is one sample."""

import re
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


UNKNOWN = [
    (Parameters, r"the model itself \(Parameters\): no known layer, but it owns shift"),
    (lambda: nn.Sequential(nn.ReLU(), Parameters()), r"  1 \(Parameters\)"),
    (lambda: nn.MultiheadAttention(4, 2), r"MultiheadAttention\): no known layer, but it owns in_proj_weight"),
    (lambda: nn.Sequential(Overridden(3, 3)), r"0 \(Overridden\): no known layer"),
    (lambda: nn.Sequential(patched()), r"0 \(Linear\): no known layer"),
    (lambda: nn.LSTMCell(3, 3), "LSTMCell"),
    (lambda: nn.EmbeddingBag(3, 3), "EmbeddingBag"),
    (lambda: nn.LSTM(3, 4, proj_size=2), "it has a proj_size"),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), "parametrizations.weight"),
]


@cases("make message", UNKNOWN)
def test_unknown_modules_are_named(make, message, caplog):
    caplog.clear()
    PerSample(make())
    (record,) = caplog.records
    assert re.search(message, record.getMessage())
    assert "every backward pass counts as one sample" in record.getMessage()


@cases(
    "make message",
    [
        (lambda: nn.Embedding(3, 3, sparse=True), "its gradient is sparse; make it with sparse=False"),
        (lambda: nn.LazyLinear(3), "run one batch through the model first"),
    ],
)
def test_what_cannot_be_sent_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        PerSample(make())


def test_a_transformer_is_exact_but_for_its_attention(caplog):
    model = made(partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True))
    x = normal(6, 5, 8)
    want = looped(model, x)
    recorder = PerSample(model)
    for _ in range(2):
        model.zero_grad()
        recorder.clear()
        loss_of(model(x)).backward()
    attention = {n: p.grad.square() for n, p in model.named_parameters() if n.startswith("self_attn")}
    assert_close({n: recorder.of(p) for n, p in model.named_parameters()}, want | attention, tolerance=1e-3)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "the attention's projection is not called, which is seen in the first pass"
    assert "self_attn (MultiheadAttention)" in said[0]
    assert said[1].startswith("self_attn.out_proj.bias, self_attn.out_proj.weight: received")


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


@cases(
    "call message",
    [
        (False, "embed.weight: received a gradient, but none of it through a call"),
        (True, "embed.weight: what .* does not add up to its gradient"),
    ],
)
def test_a_weight_that_functions_use_is_coarse(call, message, caplog):
    caplog.clear()
    model = made(partial(Functional, call))
    recorder = PerSample(model)
    for passes in (1, 2):
        loss_of(model(tokens(6, 9))).backward()
        gradient = model.embed.weight.grad / passes
        torch.testing.assert_close(recorder.of(model.embed.weight), passes * gradient.square())
    (record,) = caplog.records
    assert re.search(message, record.getMessage())


def test_samples_must_be_the_same_everywhere(caplog):
    class Positions(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared, self.words, self.positions = shared, nn.Embedding(7, 4), nn.Embedding(9, 4)

        def forward(self, x):
            at = torch.arange(x.shape[1])
            return self.words(x) + self.positions(at if self.shared else at.expand(len(x), -1))

    model, x = made(partial(Positions, True)), tokens(6, 9)
    recorder = PerSample(model)
    loss_of(model(x)).backward()
    (record,) = caplog.records
    assert re.search("sees 9 samples, and words sees 6 |sees 6 samples, and positions sees 9 ", record.getMessage())
    coarse = model.positions if record.getMessage().startswith("positions") else model.words
    torch.testing.assert_close(recorder.of(coarse.weight), coarse.weight.grad.square())
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
