"""The known layers, and how the gradients of their parameters are sums over the samples of the batch.

With ``x`` the layer's input and ``delta`` the gradient of its output, both for one sample:

| layer | weight | bias |
|---|---|---|
| Linear | sum over positions of delta x^T | sum of delta |
| Conv1d, 2d, 3d | sum over positions of delta patch(x)^T | sum of delta |
| ConvTranspose1d, 2d, 3d | sum over positions of x patch(delta)^T | sum of delta |
| Embedding | delta, added to the rows of the tokens | |
| LayerNorm, RMSNorm, GroupNorm, InstanceNorm | sum over positions of delta * normalised x | sum of delta |
| BatchNorm | the same, as an approximation; see ``BatchNorms`` | sum of delta |
| PReLU | sum over positions of delta * min(x, 0) | |
| RNN, LSTM, GRU | see ``recurrent`` | |

A layer is known by its class; a subclass counts as its base unless it overrides ``forward``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tersegrad.per_sample.convolution import correlation, padding_of
from tersegrad.per_sample.terms import Each, Products, Term, Tokens, chunks

Kept = tuple[Tensor | None, ...]


@dataclass
class Use:
    """One call of a layer whose output has received a gradient."""

    module: Any
    training: bool  # the module's mode when it was called
    batch_dim: int  # the dimension of the samples, if the layer leaves a choice
    kept: Kept  # the result of ``Layer.keep``
    deltas: Kept  # gradients of the outputs; None for an output that received none
    before: Any = None  # the result of ``Layer.before``
    memo: dict[str, Any] = field(default_factory=dict)  # results shared by the terms of several parameters


class Layer(ABC):
    """One kind of layer."""

    kinds: ClassVar[tuple[type[nn.Module], ...]]
    own: ClassVar[tuple[str, ...]] = ("forward",)  # methods; a subclass that overrides one is not known
    looks_ahead: ClassVar[bool] = False  # whether ``before`` must be called

    def names(self, module: Any) -> set[str]:
        """The names of the parameters that it handles."""
        return {"weight", "bias"}

    def refusal(self, module: Any) -> str | None:
        """The reason why this module cannot be handled; None if it can."""
        return None

    def before(self, module: Any) -> Any:
        """Called before ``forward``; the result is passed on as ``Use.before``."""
        return None

    def after(self, output: Any, before: Any) -> Any:
        """Called after ``forward``, and the result is passed on instead of that of ``before``."""
        return before

    def keep(self, names: set[str], x: Any, state: Any) -> tuple[Tensor, ...]:
        """The tensors to keep of a call's arguments; none if only the bias is trained."""
        return () if names == {"bias"} else (x,)

    def outputs(self, output: Any) -> tuple[Tensor, ...]:
        """The output tensors that may receive gradients."""
        return (output,)

    @abstractmethod
    def term(self, use: Use, name: str) -> Term:
        """The contribution of this use to the gradient of one parameter."""


def _positions(x: Tensor | None, features: int, batch_dim: int) -> Tensor:
    """Reshape to (samples, positions, ...), where the last ``features`` dimensions are features.

    A tensor without a batch dimension is one sample.
    """
    assert x is not None
    leading = x.dim() - features
    if leading < 2:
        return x[None, None] if leading == 0 else x[:, None]
    return x.movedim(batch_dim, 0).flatten(1, leading - 1)


def _channels(x: Tensor | None, spatial: int) -> Tensor:
    """Reshape to (samples, channels, *space); a tensor without a batch dimension is one sample."""
    assert x is not None
    return x[None] if x.dim() == spatial + 1 else x


def _sum_space(x: Tensor) -> Tensor:
    """(samples, channels) of (samples, channels, *space), in float32."""
    return x.float() if x.dim() == 2 else x.sum(tuple(range(2, x.dim())), dtype=torch.float32)


def _size(x: Tensor) -> int:
    """Number of elements of one sample."""
    return x.numel() // max(1, x.shape[0])


def _summed(delta: Tensor, total: Callable[[Tensor], Tensor]) -> Term:
    """The gradients of a bias."""
    return Each(delta.shape[0], 2 * _size(delta), lambda first, last: delta[first:last], total)


def _scaled(delta: Tensor, x: Tensor, normal: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> Term:
    """The gradients of a factor: the sum over positions of delta * normal(x)."""

    def products(first: int, last: int) -> Tensor:
        return delta[first:last] * normal(x[first:last].float())

    return Each(delta.shape[0], 4 * _size(delta), products, total)


# --- features last


class Linears(Layer):
    """nn.Linear."""

    kinds = (nn.Linear,)

    def term(self, use: Use, name: str) -> Term:
        delta = _positions(use.deltas[0], 1, use.batch_dim)
        if name == "bias":
            return position_sums(delta)
        return outer(delta, _positions(use.kept[0], 1, use.batch_dim))


def outer(delta: Tensor, x: Tensor) -> Term:
    """Sum over positions of delta x^T; both are (samples, positions, features)."""

    def operands(first: int, last: int) -> tuple[Tensor, Tensor]:
        return delta[first:last].float().transpose(1, 2), x[first:last].float()

    samples, positions, rows = delta.shape
    return Products(samples, operands, positions * (rows + x.shape[2]), positions, (rows, x.shape[2]))


def position_sums(delta: Tensor) -> Term:
    """Sum over positions of delta, (samples, positions, ...)."""
    return _summed(delta, lambda part: part.sum(1, dtype=torch.float32))


class Embeddings(Layer):
    """nn.Embedding."""

    kinds = (nn.Embedding,)

    def term(self, use: Use, name: str) -> Term:
        module = use.module
        tokens = _positions(use.kept[0], 0, use.batch_dim)
        delta = _positions(use.deltas[0], 1, use.batch_dim)
        if module.scale_grad_by_freq:
            delta = delta / torch.bincount(tokens.flatten())[tokens][:, :, None]
        return Tokens(tokens, delta, module.num_embeddings, module.padding_idx)


class LayerNorms(Layer):
    """LayerNorm and RMSNorm: over the last dimensions."""

    kinds = (nn.LayerNorm, nn.RMSNorm)

    def term(self, use: Use, name: str) -> Term:
        module, shape = use.module, use.module.normalized_shape
        delta = _positions(use.deltas[0], len(shape), use.batch_dim)
        if name == "bias":
            return position_sums(delta)
        x = _positions(use.kept[0], len(shape), use.batch_dim)
        if isinstance(module, nn.RMSNorm):
            eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
            return _scaled(delta, x, lambda part: functional.rms_norm(part, shape, eps=eps), lambda part: part.sum(1))
        return _scaled(
            delta, x, lambda part: functional.layer_norm(part, shape, eps=module.eps), lambda part: part.sum(1)
        )


# --- channels in the second dimension


class GroupNorms(Layer):
    """GroupNorm: over groups of channels of one sample."""

    kinds = (nn.GroupNorm,)

    def term(self, use: Use, name: str) -> Term:
        """Sums over space."""
        module, (delta,) = use.module, use.deltas
        assert delta is not None
        if name == "bias":
            return _summed(delta, _sum_space)
        (x,) = use.kept
        assert x is not None
        normal = lambda part: functional.group_norm(part, module.num_groups, eps=module.eps)  # noqa: E731
        return _scaled(delta, x, normal, _sum_space)


class InstanceNorms(Layer):
    """InstanceNorm: over each channel of one sample."""

    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    own = ("forward", "_apply_instance_norm")

    def term(self, use: Use, name: str) -> Term:
        """Sums over space."""
        module = use.module
        spatial = 1 + [isinstance(module, kind) for kind in self.kinds].index(True)
        delta = _channels(use.deltas[0], spatial)
        if name == "bias":
            return _summed(delta, _sum_space)
        x = _channels(use.kept[0], spatial)
        if use.training or not module.track_running_stats:
            return _scaled(delta, x, lambda part: functional.instance_norm(part, eps=module.eps), _sum_space)
        return _scaled(delta, x, _standardise(module.running_mean, module.running_var, module.eps), _sum_space)


class BatchNorms(Layer):
    """BatchNorm. In training each output depends on all samples, so the gradient of a sample is not defined.

    It is approximated by the contribution of the sample's own outputs: the sum over space of delta * normalised x
    (weight) and of delta (bias). These add up to the gradient. In evaluation mode the statistics are constants, and
    the result is exact.
    """

    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

    def after(self, output: Any, before: Any) -> Any:
        """Mean and 1 / sqrt(variance + eps) of this batch, if torch's function has kept them for its own gradient."""
        node = output.grad_fn
        mean, factor = (getattr(node, f"_saved_result{i}", None) for i in (1, 2))
        return (mean, factor) if mean is not None and mean.numel() == output.shape[1] else None

    def term(self, use: Use, name: str) -> Term:
        """Sums over space."""
        module, (delta,) = use.module, use.deltas
        assert delta is not None
        if name == "bias":
            return _summed(delta, _sum_space)
        (x,) = use.kept
        assert x is not None
        if use.training or module.running_mean is None:
            mean, factor = use.before or _moments(x, module.eps)
        else:
            mean, factor = module.running_mean, torch.rsqrt(module.running_var + module.eps)
        return Standardised(delta, x, mean, factor)


class Standardised(Each):
    """The gradients of a factor of (x - mean) * factor, channel by channel; mean and factor are constants."""

    def __init__(self, delta: Tensor, x: Tensor, mean: Tensor, factor: Tensor):
        shape = (-1, *[1] * (x.dim() - 2))

        def products(first: int, last: int) -> Tensor:
            return delta[first:last] * ((x[first:last].float() - mean.view(shape)) * factor.view(shape))

        super().__init__(delta.shape[0], 4 * _size(delta), products, _sum_space)
        self._operands = delta, x, mean, factor

    def part(self, first: int, last: int) -> "Standardised":
        delta, x, mean, factor = self._operands
        return Standardised(delta[first:last], x[first:last], mean, factor)

    def gradients(self, first: int, last: int) -> Tensor:
        """Without an intermediate result of the size of x where memory is laid out as shapes are."""
        delta, x, mean, factor = self._operands
        delta, x = delta[first:last].float(), x[first:last].float()
        return (_dots(delta, x) - _sum_space(delta) * mean) * factor


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """(samples, channels): sums over space of a * b."""
    if a.dim() == 2 or not (a.is_contiguous() and b.is_contiguous()):
        return _sum_space(a * b)
    rows = a.shape[0] * a.shape[1]
    return torch.bmm(a.view(rows, 1, -1), b.view(rows, -1, 1)).view(a.shape[:2])


def _moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of each channel; ``torch.var_mean`` takes ten times as long here."""
    over = [axis for axis in range(x.dim()) if axis != 1]
    mean = x.mean(over, dtype=torch.float32)
    shape = (-1, *[1] * (x.dim() - 2))
    squares = torch.zeros_like(mean)
    for first, last in chunks(x.shape[0], 2 * _size(x)):
        squares += (x[first:last].float() - mean.view(shape)).square_().sum(over)
    return mean, torch.rsqrt(squares / (x.numel() // mean.numel()) + eps)


def _standardise(mean: Tensor, variance: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """(x - mean) / sqrt(variance + eps), channel by channel."""

    def standard(x: Tensor) -> Tensor:
        shape = (-1, *[1] * (x.dim() - 2))
        return (x - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)

    return standard


class PReLUs(Layer):
    """PReLU: learned slopes for negative inputs."""

    kinds = (nn.PReLU,)

    def term(self, use: Use, name: str) -> Term:
        """Sums over space, and over channels if they share one slope."""
        (x,), (delta,) = use.kept, use.deltas
        assert x is not None
        assert delta is not None
        if x.dim() < 2:
            x, delta = x.reshape(-1, 1), delta.reshape(-1, 1)

        def total(part: Tensor) -> Tensor:
            return _sum_space(part) if use.module.num_parameters > 1 else part.flatten(1).sum(1, keepdim=True)

        return _scaled(delta, x, lambda part: part.clamp(max=0), total)


class Convolutions(Layer):
    """Convolutions with any stride, dilation, groups and padding."""

    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    own = ("forward", "_conv_forward")

    def term(self, use: Use, name: str) -> Term:
        """Outer products of delta and the patches of x."""
        module, spatial = use.module, len(use.module.kernel_size)
        delta = _channels(use.deltas[0], spatial)
        if name == "bias":
            return _summed(delta, _sum_space)
        x = _channels(use.kept[0], spatial)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        return correlation(module, delta, x, padding_of(module), mode)


class TransposedConvolutions(Layer):
    """Transposed convolutions: input and output swap their roles."""

    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

    def term(self, use: Use, name: str) -> Term:
        """Outer products of x and the patches of delta."""
        module, spatial = use.module, len(use.module.kernel_size)
        delta = _channels(use.deltas[0], spatial)
        if name == "bias":
            return _summed(delta, _sum_space)
        return correlation(module, _channels(use.kept[0], spatial), delta, padding_of(module), "constant")
