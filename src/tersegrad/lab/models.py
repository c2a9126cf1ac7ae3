"""The models of the workloads. Language models map (tokens, state) to (logits, state); the others take images.

Weights are drawn from torch's global generator; ``Workload.model`` seeds it, and restores it afterwards.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

Recurrent = tuple[Tensor, Tensor] | None  # hidden state of a recurrent model; None at the start of a text


def mlp() -> nn.Module:
    """8x8 digits: three fully connected layers, 301,066 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def cnn() -> nn.Module:
    """28x28 grey images: two convolutions and two fully connected layers, 421,642 parameters."""
    return nn.Sequential(
        *[nn.Conv2d(1, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()],
        *[nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()],
        *[nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)],
    )


def resnet20() -> nn.Module:
    """ResNet-20 for CIFAR-10 (He et al. 2015, section 4.2, shortcuts without parameters): 269,722 parameters."""
    widths = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    net = nn.Sequential(
        *[_conv(3, 16), nn.BatchNorm2d(16), nn.ReLU()],
        *[Residual(*shape) for shape in widths],
        *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)],
    )
    return _he(net)


def vgg16(slim: int = 1) -> nn.Module:
    """VGG-16 for CIFAR-10: its 13 convolutions with BatchNorm and one linear layer, 14,724,042 parameters.

    ``slim`` divides the width of every layer; 4 leaves 923,130 parameters.
    """
    layers: list[nn.Module] = []
    channels = 3
    for full_width, depth in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        width = full_width // slim
        for _ in range(depth):
            layers += [_conv(channels, width), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return _he(nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10)))


class Residual(nn.Module):
    """relu(x + conv-norm-relu-conv-norm); where the shape changes, x is strided and padded with zero channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.fill = stride, width - channels
        self.body = nn.Sequential(
            *[_conv(channels, width, stride), nn.BatchNorm2d(width), nn.ReLU()],
            *[_conv(width, width), nn.BatchNorm2d(width)],
        )

    def forward(self, x: Tensor) -> Tensor:
        short = x
        if self.stride > 1 or self.fill:
            half = self.fill // 2
            short = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.fill - half))
        return functional.relu(self.body(x) + short)


class WordLSTM(nn.Module):
    """Embedding, LSTM layers, logits of the next word; dropout between all of them (Zaremba et al. 2014)."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float, spread: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.scores = nn.Linear(width, vocabulary)
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -spread, spread)

    def forward(self, tokens: Tensor, state: Recurrent = None) -> tuple[Tensor, Recurrent]:
        """``tokens`` is (streams, time)."""
        x, state = self.lstm(self.dropout(self.embed(tokens)), state)
        return self.scores(self.dropout(x)), state


class CharGPT(nn.Module):
    """A decoder-only transformer with learned position embeddings and pre-norm (as GPT-2), without dropout."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, state: Recurrent = None) -> tuple[Tensor, Recurrent]:
        """``tokens`` is (texts, time), time at most the context. It has no recurrent state."""
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.scores(self.norm(self.blocks(x))), None


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return torch.add(x, self.mlp(x))


def _conv(channels: int, width: int, stride: int = 1) -> nn.Module:
    """3x3 without bias: the BatchNorm that follows would cancel it."""
    return nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)


def _he(net: nn.Module) -> nn.Module:
    """He's initialisation for the convolutions."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return net
