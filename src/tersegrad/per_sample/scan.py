"""Finds the known layers of a model, and the trainable parameters that belong to none of them."""

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import UninitializedParameter

from tersegrad.per_sample import layers
from tersegrad.per_sample.layers import Layer
from tersegrad.per_sample.recurrent import Recurrents

INSTEAD = 'Write VGC(..., squares="microbatch"), which works with any model.'
LAYERS: tuple[Layer, ...] = (
    layers.Linears(),
    layers.Convolutions(),
    layers.TransposedConvolutions(),
    layers.Embeddings(),
    layers.LayerNorms(),
    layers.GroupNorms(),
    layers.InstanceNorms(),
    layers.BatchNorms(),
    layers.PReLUs(),
    Recurrents(),
)


@dataclass(frozen=True)
class Found:
    """A known layer with trainable parameters."""

    path: str
    module: nn.Module
    layer: Layer
    parameters: dict[str, nn.Parameter]  # the trainable ones


def scan(model: nn.Module) -> tuple[list[Found], list[str]]:
    """All known layers with trainable parameters, and a line of text for each module whose own are not known.

    ValueError if no gradient of a parameter could be used at all.
    """
    found, unknown, problems = [], [], []
    for path, module in model.named_modules():
        parameters = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        if not parameters:
            continue
        where = f"  {path or 'the model itself'} ({type(module).__name__}): "
        if problem := _problem(module, parameters):
            problems.append(where + problem)
            continue
        layer = _layer(module)
        reason = _unknown(module, layer, parameters)
        if layer is None or reason is not None:
            unknown.append(where + str(reason))
        else:
            found.append(Found(path, module, layer, parameters))
    if problems:
        raise ValueError("Gradients per sample cannot be had of\n" + "\n".join(problems))
    return found, unknown


def _layer(module: nn.Module) -> Layer | None:
    """The ``Layer`` of a module, by the nearest known class whose ``own`` methods it does not override."""
    for base in type(module).__mro__:
        for layer in LAYERS:
            if base in layer.kinds:
                same = all(getattr(type(module), name) is getattr(base, name) for name in layer.own)
                return layer if same and not any(name in module.__dict__ for name in layer.own) else None
    return None


def _problem(module: nn.Module, parameters: dict[str, nn.Parameter]) -> str | None:
    """The reason why a module's parameters must be changed first; None if they need not."""
    if any(isinstance(p, UninitializedParameter) for p in parameters.values()):
        return "its parameters have no shape yet; run one batch through the model first"
    if getattr(module, "sparse", False) is True:  # DDP does not pass sparse gradients to communication hooks
        return "its gradient is sparse; make it with sparse=False"
    return None


def _unknown(module: nn.Module, layer: Layer | None, parameters: dict[str, nn.Parameter]) -> str | None:
    """The reason why the samples of a module cannot be told apart; None if they can."""
    if layer is None:
        return f"no known layer, but it owns {', '.join(parameters)}"
    if refusal := layer.refusal(module):
        return refusal
    if unknown := parameters.keys() - layer.names(module):
        return f"it owns {', '.join(sorted(unknown))}, which a layer of this kind does not have by itself"
    return None
